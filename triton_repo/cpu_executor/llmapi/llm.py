"""``LLM`` of the LLM API, implemented with the CPU executor."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from triton_repo.cpu_executor.engine import load_config
from triton_repo.cpu_executor.enums import ModelType
from triton_repo.cpu_executor.executor import Executor
from triton_repo.cpu_executor.llmapi.llm_args import read_args
from triton_repo.cpu_executor.llmapi.lora import LoraAdapters, LoRARequest
from triton_repo.cpu_executor.llmapi.outputs import RequestOutput
from triton_repo.cpu_executor.llmapi.sampling_params import SamplingParams
from triton_repo.cpu_executor.llmapi.tokenizer import TextTokenizer
from triton_repo.cpu_executor.request import Request
from triton_repo.cpu_executor.result import Response
from triton_repo.cpu_executor.sampling_config import OutputConfig

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A model, its tokenizer and its executor in this process.

    Args:
        model: a Hugging Face folder of a Llama or GPT-2, or an engine folder of the CPU executor.
        tokenizer: folder of the tokenizer's files; None if they are in the model's folder.
        arguments: the fields of `llm_args.LlmArgs`; GPU settings are ignored.

    Raises ``ValueError`` for an argument that the CPU executor does not know.
    """

    def __init__(self, model: str, tokenizer: str | None = None, **arguments: Any) -> None:
        args = read_args({"model": model, "tokenizer": tokenizer, **arguments})
        self._args = args
        self.tokenizer = TextTokenizer(args.tokenizer_folder)
        # Build the engine in a temporary folder. The folder can be deleted after this block,
        # because the constructor of Executor reads all files.
        with tempfile.TemporaryDirectory() as workspace:
            folder = args.engine_folder(Path(workspace))
            config = load_config(folder)
            self._max_seq_len = config.max_seq_len
            self._lora = None
            if config.lora_target_modules:
                self._lora = LoraAdapters(folder, (args.lora_config or {}).get("max_cpu_loras"))
            self._executor = Executor(folder, ModelType.DECODER_ONLY, args.executor_config())
        # Read adapters in a separate thread, as TensorRT-LLM's worker does. The caller may run an
        # event loop, which must not block.
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")
        self._lock = threading.Lock()
        self._running: dict[int, RequestOutput] = {}
        self._dispatcher = threading.Thread(target=self._dispatch, name="dispatcher", daemon=True)
        self._dispatcher.start()

    def generate_async(
        self,
        inputs: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_adapter_request: None = None,
        streaming: bool = False,
    ) -> RequestOutput:
        """Start a request, and return its output object without waiting. Not thread-safe.

        If this method is called in an event loop, the output can be awaited in that loop only.

        Args:
            inputs: a text, token ids, or a mapping with `prompt` or `prompt_token_ids`.
            sampling_params: None selects the defaults.
            lora_request: the adapter, which is read in a separate thread. If it cannot be read, the
                output raises the error. An object of another class is ignored, because `model.py`
                of release 1.2 passes `streaming` in this position.
            prompt_adapter_request: not supported; must be None.
            streaming: True to get a response for each step.

        Raises ``ValueError`` for a request that cannot run.
        """
        if prompt_adapter_request is not None:
            raise ValueError("prompt_adapter_request: not supported by the CPU executor")
        params = sampling_params or SamplingParams()
        text, ids = self._prompt(inputs, params)
        self._check_lengths(len(ids))
        stops = self._stops(params)
        output = RequestOutput(text, ids, params, stops, self.tokenizer, streaming=streaming)
        output.abort = partial(self._abort, output)
        request = partial(
            Request,
            ids,
            params.max_tokens,
            streaming=streaming,
            sampling_config=params.sampling_config(),
            output_config=OutputConfig(
                exclude_input_from_output=params.exclude_input_from_output,
                return_perf_metrics=params.return_perf_metrics,
            ),
            end_id=self._end_id(params),
            stop_words=[words for _, words in stops],
        )
        if not isinstance(lora_request, LoRARequest):
            self._begin(output, request())
        elif self._lora is None:
            raise ValueError("lora_request: the model was loaded without lora_config")
        else:
            self._reader.submit(self._begin_with, self._lora, lora_request, output, request)
        return output

    def generate(self, inputs: Any, *arguments: Any, **more: Any) -> Any:
        """Wait until the completion of a prompt has ended, and return its `RequestOutput`.

        For a list of prompts, return a list of `RequestOutput` objects. The other arguments are
        those of `generate_async`.
        """
        if isinstance(inputs, str | Mapping) or all(isinstance(each, int) for each in inputs):
            return self.generate_async(inputs, *arguments, **more).result()
        started = [self.generate_async(each, *arguments, **more) for each in inputs]
        return [output.result() for output in started]

    def shutdown(self) -> None:
        """Refuse new requests, and wait until the accepted requests have ended."""
        self._reader.shutdown()
        self._executor.shutdown()
        self._dispatcher.join()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _prompt(self, inputs: Prompt, params: SamplingParams) -> tuple[str | None, list[int]]:
        given: Any = inputs
        if isinstance(inputs, Mapping):
            given = inputs["prompt"] if "prompt" in inputs else inputs["prompt_token_ids"]
        if isinstance(given, str):
            return given, self.tokenizer.encode(given, special=params.add_special_tokens)
        return None, list(given)

    def _check_lengths(self, prompt: int) -> None:
        limit = self._args.max_num_tokens
        if limit and not self._args.enable_chunked_prefill and prompt > limit:
            raise ValueError(
                f"The prompt's length ({prompt}) should not exceed max_num_tokens ({limit})"
            )
        if prompt >= self._max_seq_len:
            raise ValueError(
                f"The prompt's length ({prompt}) leaves no tokens for an answer in max_seq_len "
                f"({self._max_seq_len})"
            )

    def _stops(self, params: SamplingParams) -> list[tuple[int | str, list[int]]]:
        """Return the stop strings and stop token ids of a request as (stop reason, token ids).

        The stop reason is the stop string itself or the stop token id itself. The request's end id
        is not included.
        """
        stops: list[tuple[int | str, list[int]]] = [
            (stop, self.tokenizer.encode(stop, special=False)) for stop in params.stop_strings
        ]
        ends = [] if params.ignore_eos else self.tokenizer.end_ids
        ids = dict.fromkeys([*(params.stop_token_ids or ()), *ends])
        return stops + [(end, [end]) for end in ids if end != self._end_id(params)]

    def _end_id(self, params: SamplingParams) -> int | None:
        if params.ignore_eos:
            return -1
        return self.tokenizer.end_id if params.end_id is None else params.end_id

    def _begin(self, output: RequestOutput, request: Request) -> None:
        # Hold the lock while queueing. Otherwise the dispatcher could get a response before
        # `_running` has the request's id.
        with self._lock:
            engine_id = output.request_id = self._executor.enqueue_request(request)
            self._running[engine_id] = output
            if output.aborted:
                self._executor.cancel_request(engine_id)

    def _begin_with(
        self,
        adapters: LoraAdapters,
        wanted: LoRARequest,
        output: RequestOutput,
        request: Callable[..., Request],
    ) -> None:
        """Read the adapter and start the request. Called in the thread of `_reader`.

        If the adapter cannot be read or the request cannot start, pass an error response to
        `output`.
        """
        try:
            self._begin(output, request(lora_config=adapters.get(wanted)))
        except Exception as error:
            output.receive(Response(output.request_id, str(error)))

    def _abort(self, output: RequestOutput) -> None:
        """Cancel a request. While its adapter is still being read, leave this to `_begin`."""
        with self._lock:
            output.aborted = True
            if self._running.get(output.request_id) is output:
                self._executor.cancel_request(output.request_id)

    def _dispatch(self) -> None:
        """Pass responses to the outputs of their requests, until the executor has shut down."""
        while True:
            try:
                responses = self._executor.await_responses()
            except RuntimeError as error:
                self._fail(str(error))
                return
            for response in responses:
                with self._lock:
                    output = self._running[response.request_id]
                    if response.has_error() or response.result.is_final:
                        del self._running[response.request_id]
                output.receive(response)

    def _fail(self, message: str) -> None:
        with self._lock:
            left = list(self._running.items())
            self._running.clear()
        for engine_id, output in left:
            output.receive(Response(engine_id, message))
