"""``RequestOutput`` and ``CompletionOutput`` of the LLM API: the output of a request.

The objects are updated with each response of the executor.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from triton_repo.cpu_executor.enums import FinishReason
from triton_repo.cpu_executor.llmapi.sampling_params import SamplingParams
from triton_repo.cpu_executor.llmapi.tokenizer import Detokenizer, TextTokenizer
from triton_repo.cpu_executor.result import RequestPerfMetrics, Response, Result

FINISH_REASONS = {
    FinishReason.END_ID: "stop",
    FinishReason.STOP_WORDS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMED_OUT: "timeout",
    FinishReason.CANCELLED: "cancelled",
}


class RequestError(RuntimeError):
    """The engine refused a request, or ended it with an error."""


@dataclass(slots=True)
class CompletionOutput:
    """The text generated so far, and its token ids.

    ``text_diff`` and ``token_ids_diff`` are the text and ids that the last response added.
    ``stop_reason`` is the stop string or the stop token id that ended the text. It is None if EOS
    or the length limit ended the text. ``cumulative_logprob`` is always None, because no field of
    ``SamplingParams`` requests it here.
    """

    index: int = 0
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    _last_text_len: int = 0
    _last_token_ids_len: int = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        return self.text[self._last_text_len :]

    @property
    def token_ids_diff(self) -> list[int]:
        return self.token_ids[self._last_token_ids_len :]


class RequestOutput:
    """The output of a request, which is updated with each response of the executor.

    ``async for`` waits for the next response, and yields this same object each time. ``await`` and
    ``result`` wait until the output is complete. All three raise ``RequestError`` if the executor
    refused the request or ended it with an error. An object that was created in an event loop can
    be awaited in that loop only.
    """

    def __init__(
        self,
        prompt: str | None,
        prompt_token_ids: list[int],
        params: SamplingParams,
        stops: list[tuple[int | str, list[int]]],
        tokenizer: TextTokenizer,
        *,
        streaming: bool,
    ) -> None:
        self.request_id = 0
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.aborted = False
        self.abort: Callable[[], None]
        """Callback that cancels the request; `LLM` sets it.

        The engine ends the request at its next step.
        """
        self._params = params
        self._stops = stops
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, skip_special=params.skip_special_tokens)
        self._streaming = streaming
        self._responses: queue.SimpleQueue[Response] = queue.SimpleQueue()
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self._arrived = asyncio.Event()

    def receive(self, response: Response) -> None:
        """Queue a response of the executor for the waiting caller. Thread-safe."""
        self._responses.put(response)
        # Do not wake a closed event loop. It would raise an error, and no task waits in it.
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._arrived.set)

    def __aiter__(self) -> RequestOutput:
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        while self._responses.empty():
            self._arrived.clear()
            await self._arrived.wait()
        self._take(self._responses.get_nowait())
        return self

    async def aresult(self) -> RequestOutput:
        """Wait until the output is complete, and return this object."""
        async for _ in self:
            pass
        return self

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait until the output is complete, and return this object.

        Raises ``queue.Empty`` if no response arrives for `timeout` seconds.
        """
        while not self.finished:
            self._take(self._responses.get(timeout=timeout))
        return self

    def _take(self, response: Response) -> None:
        if response.has_error():
            self.finished = True
            raise RequestError(response.error_msg)
        result, output = response.result, self.outputs[0]
        output._last_text_len = len(output.text)
        output._last_token_ids_len = len(output.token_ids)
        output.token_ids += result.output_token_ids[0]
        self.finished = result.is_final
        if self.finished:
            self._finish(output, result)
        if self._streaming:
            self._detokenizer.add(output.token_ids_diff, flush=self.finished)
            output.text = self._detokenizer.text
        else:
            skip = self._params.skip_special_tokens
            output.text = self._tokenizer.decode(output.token_ids, skip_special=skip)

    def _finish(self, output: CompletionOutput, result: Result) -> None:
        reason = result.finish_reasons[0]
        output.finish_reason = FINISH_REASONS.get(reason)
        output.request_perf_metrics = result.request_perf_metrics
        if reason is not FinishReason.STOP_WORDS:
            return
        for stop, ids in self._stops:
            if output.token_ids[-len(ids) :] == ids:
                output.stop_reason = stop
                if not self._params.include_stop_str_in_output:
                    del output.token_ids[-len(ids) :]
                return
