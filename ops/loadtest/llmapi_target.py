"""Target of a load test: the llmapi repository's model in Triton, over gRPC."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from gateway.errors import GatewayError
from gateway.tokenization.prompts import Prompts
from gateway.triton.direct import DirectModel, replies
from gateway.triton.llmapi.reader import LlmapiReader
from ops.loadtest.requests import BenchRequest
from ops.loadtest.sample import Mode, Sample
from ops.loadtest.targets import RequestFailed


class LlmapiTarget:
    """The llmapi repository's model in Triton, over gRPC.

    The model's responses do not state the number of output tokens. If the finish reason is
    `length`, this class assumes the requested number. Otherwise it tokenizes the generated text.
    """

    def __init__(
        self, mode: Mode, model: DirectModel, prompts: Prompts, *, streaming: bool
    ) -> None:
        self.mode: Mode = mode
        self._model = model
        self._prompts = prompts
        self._streaming = streaming

    @property
    def what(self) -> str:
        late = ", all of it at its end" if self._streaming and self._model.sends_at_end else ""
        return f"{self._model.name} of llmapi over gRPC, text{late}"

    async def ask(self, request: BenchRequest, sample: Sample, now: Callable[[], float]) -> None:
        build = self._model.request(uuid.uuid4().hex)
        build.texts("prompt", [request.text])
        build.scalar("max_tokens", request.output_tokens)
        build.scalar("top_k", 1)
        build.scalar("exclude_prompt", True)
        for told in ("finish_reason", "stop_reason"):
            if build.has(told):
                build.scalar(told, True)
        if self._streaming:
            build.scalar("streaming", True)
        sample.input_tokens = len(request.ids)
        reader = LlmapiReader(decoupled=self._model.decoupled)
        text, finish, unshown = "", None, 0
        try:
            stream = await self._model.send(build.request)
            try:
                async for reply in replies(stream):
                    if reply.error:
                        raise RequestFailed(reply.error)
                    delta = reply.delta(reader)
                    text, finish, unshown = text + (delta.text or ""), delta.finish, delta.unshown
                    if delta.text and self._streaming:
                        sample.record_token(now())
            finally:
                stream.cancel()
        except GatewayError as error:
            raise RequestFailed(error.message) from error
        sample.output_tokens = request.output_tokens
        if finish != "length":
            found = self._prompts.tokenizer.encode(text, add_special_tokens=False)
            sample.output_tokens = len(found.ids) + unshown
