"""`TokenStream`: the engine's answer to one generation, read as `TokenDelta` objects.

See decision 001 in docs/decisions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from gateway.deltas import TokenDelta
from gateway.errors import EngineUnavailable
from gateway.generation.engine_request import Generation
from gateway.stops import EarlyStop, StopReason
from gateway.triton import tensors, text_tensors
from gateway.triton.client import parse_response
from gateway.triton.engine_call import EngineCall
from gateway.triton.failures import from_text
from gateway.triton.llmapi.reader import LlmapiReader
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.protobuf import pb
from gateway.triton.request import InferRequest
from gateway.triton.response_template import ResponseTemplate
from gateway.triton.stream_owner import StreamOwner
from gateway.triton.transport import Metadata, ResponseStream

T = TypeVar("T")


class Offload(Protocol):
    """Type of a function that runs CPU-intensive work in another thread."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """Run `work`, and return its result or raise its error."""


class TokenStream(EngineCall):
    """The engine's answer to one generation. Read it in ``with engine.generate(g) as tokens``."""

    def __init__(
        self,
        *,
        engine: StreamOwner,
        capabilities: ModelCapabilities,
        request: InferRequest,
        generation: Generation,
        deadline: float,
        metadata: Metadata,
        offload: Offload,
        begin_by: float | None = None,
        on_sent: Callable[[], None] = lambda: None,
        on_abandon: Callable[[StopReason], EarlyStop] = EarlyStop,
    ) -> None:
        """Prepare the call. See `EngineCall` for the other arguments.

        `offload` runs the work on logits in another thread, because searching a vocabulary for the
        most likely tokens takes 100 times as long as processing one token.
        """
        super().__init__(
            engine=engine,
            capabilities=capabilities,
            request=request,
            generation=generation,
            deadline=deadline,
            metadata=metadata,
            begin_by=begin_by,
            on_sent=on_sent,
            on_abandon=on_abandon,
        )
        self._reader: text_tensors.TextReader | LlmapiReader | None = None
        if capabilities.llmapi is not None:
            self._reader = LlmapiReader(
                decoupled=capabilities.decoupled, tokens_per_block=capabilities.tokens_per_block
            )
        elif capabilities.text is not None and generation.text is not None:
            self._reader = text_tensors.TextReader(capabilities, capabilities.text, generation.text)
        # True if responses have only token ids, so that all responses after the first can be read
        # with a template.
        self._plain = self._reader is None and generation.params.logprobs is None
        # The last response in serialized and in parsed form, if no template has been made yet. When
        # the next response is read, the template is made from this response.
        self._earlier: tuple[bytes, pb.ModelInferResponse] | None = None
        self._template: ResponseTemplate | None = None
        # The function that gets the deltas after the first one.
        self._take: Callable[[TokenDelta], bool]
        self._offload = offload
        self._offload_logprobs = offload if generation.params.logprobs else None

    @property
    def reports_reuse(self) -> bool:
        """True if the engine reports how many tokens of the prompt were cached.

        If no token was cached, the engine reports nothing.
        """
        return self._generation.params.usage and "cache_stats" in self._capabilities.inputs

    async def first(self) -> TokenDelta:
        """Return the first delta. Raise GatewayError if the engine fails."""
        response = await self.response()
        if self._offload_logprobs is None:
            return self._delta(response)
        return await self._offload_logprobs(partial(self._delta, response))

    async def feed_deltas(self, take: Callable[[TokenDelta], bool]) -> None:
        """Call `take` with each delta after the first one, until the answer ends.

        If `take` returns False, return, but first call `take` with all other deltas that have
        arrived at the same time. `take` is called directly when bytes are received, so it must not
        block. Tokens that arrived together may be combined in one delta.
        """
        if self._finished or self._stream is None:
            raise EngineUnavailable("The inference server ended the stream early.")
        if self._offload_logprobs is not None:
            await self._feed_from_logits(self._stream, self._offload_logprobs, take)
            return
        self._take = take
        read = self._read_tokens
        if isinstance(self._reader, LlmapiReader):
            read = partial(self._read_texts, self._reader)
        try:
            more_follows = await self._stream.feed(read)
        except (asyncio.CancelledError, EngineUnavailable) as error:
            raise self._to_end_error(error) from None
        if not more_follows:
            raise self._ended_early_error()

    def _read_texts(self, reader: LlmapiReader, messages: Sequence[bytes]) -> bool:
        # If several responses arrived together, read only the text of the last response. Each
        # response has the complete text so far.
        self._engine.has_received = True
        take = self._take
        more, found = True, None
        for data in messages:
            if (text := reader.find_text(data)) is not None:
                found = data, text
                continue
            if found is not None:
                more = take(reader.text_delta(*found)) and more
                found = None
            more = take(self._delta(self._check(self._parse(data)))) and more
            if self._finished:
                return False
        if found is not None:
            more = take(reader.text_delta(*found)) and more
            self._engine.record_token()
        return more

    def _read_tokens(self, messages: Sequence[bytes]) -> bool:
        self._engine.has_received = True
        take = self._take
        if self._earlier is not None:
            self._template, self._earlier = ResponseTemplate.of(*self._earlier), None
        template = self._template
        more, ids = True, []
        for data in messages:
            token = None if template is None else template.token(data)
            if token is not None:
                ids.append(token)
                continue
            if ids:
                more = take(TokenDelta(ids, False)) and more
                ids = []
            more = take(self._delta(self._check(self._parse(data)))) and more
            if self._finished:
                return False
        if ids:
            more = take(TokenDelta(ids, False)) and more
        return more

    async def _feed_from_logits(
        self, stream: ResponseStream[bytes], offload: Offload, take: Callable[[TokenDelta], bool]
    ) -> None:
        """Call `take` like `feed_deltas`, with log probabilities that are computed from logits.

        Messages that arrived together are processed together in another thread. Messages that
        arrive in the meantime wait in the stream. If its flow-control window is full, they wait in
        Triton.
        """
        messages: list[bytes] = []

        def enough(came: Sequence[bytes]) -> bool:
            messages.extend(came)
            return False

        more = True
        while more:
            messages.clear()
            try:
                more_follows = await stream.feed(enough)
            except (asyncio.CancelledError, EngineUnavailable) as error:
                raise self._to_end_error(error) from None
            if not more_follows:
                raise self._ended_early_error()
            self._engine.has_received = True
            for found in await offload(partial(self._deltas, messages)):
                if isinstance(found, str):
                    self._finished = True
                    raise from_text(found)
                self._finished = found.final
                more = take(found) and more and not self._finished

    def _deltas(self, messages: Sequence[bytes]) -> list[TokenDelta | str]:
        """Return one item for each response: its delta, or its error message."""
        responses = [parse_response(data) for data in messages]
        return [each.error_message or self._delta(each.infer_response) for each in responses]

    def _delta(self, response: pb.ModelInferResponse) -> TokenDelta:
        if self._reader is not None:
            delta = self._reader.delta(response)
            if delta.text or delta.finish:
                self._engine.record_token()
            return delta
        return tensors.token_delta(response, self._capabilities, self._generation)

    async def beams(self) -> list[TokenDelta]:
        """Return one delta for each beam of a beam search, the best beam first.

        Raise GatewayError if the engine fails.
        """
        deltas: list[TokenDelta] = []
        while not self._finished:
            response = await self.response()
            if isinstance(self._reader, text_tensors.TextReader):
                deltas += self._reader.beams(response)
            else:
                deltas += tensors.beam_deltas(response, self._capabilities, self._generation)
        return deltas

    def _parse(self, data: bytes) -> pb.ModelStreamInferResponse:
        response = parse_response(data)
        if self._plain and self._template is None and not response.error_message:
            self._earlier = data, response.infer_response
        if isinstance(self._reader, LlmapiReader):
            self._reader.learn(data, response.infer_response)
        return response
