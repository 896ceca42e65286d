"""The answer to one generation: token deltas out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeVar

from gateway.deltas import TokenDelta
from gateway.errors import EngineUnavailable
from gateway.generation import Generation
from gateway.stops import EarlyStop, StopReason
from gateway.triton import tensors, text_tensors
from gateway.triton.client import parse_response
from gateway.triton.engine_call import EngineCall
from gateway.triton.failures import from_text
from gateway.triton.llmapi.reader import LlmapiReader
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.protobuf import pb
from gateway.triton.request import Request
from gateway.triton.response_template import ResponseTemplate
from gateway.triton.stream_owner import StreamOwner
from gateway.triton.transport import Metadata, ResponseStream

T = TypeVar("T")


class Aside(Protocol):
    """Where work is done that would take too long in the event loop."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """What `work` returns. Raises what it raises."""


class TokenStream(EngineCall):
    """The answer to one generation, to be read inside ``with engine.generate(g) as tokens``."""

    def __init__(
        self,
        *,
        engine: StreamOwner,
        capabilities: ModelCapabilities,
        request: Request,
        generation: Generation,
        deadline: float,
        metadata: Metadata,
        aside: Aside,
        begin_by: float | None = None,
        on_sent: Callable[[], None] = lambda: None,
        on_left: Callable[[StopReason], EarlyStop] = EarlyStop,
    ) -> None:
        """As `EngineCall`. `aside` is for logits: to find the likeliest of a vocabulary takes a
        hundred times what a token takes."""
        super().__init__(
            engine=engine,
            capabilities=capabilities,
            request=request,
            generation=generation,
            deadline=deadline,
            metadata=metadata,
            begin_by=begin_by,
            on_sent=on_sent,
            on_left=on_left,
        )
        self._reader: text_tensors.TextReader | LlmapiReader | None = None
        if capabilities.llmapi is not None:
            self._reader = LlmapiReader(
                decoupled=capabilities.decoupled, tokens_per_block=capabilities.tokens_per_block
            )
        elif capabilities.text is not None and generation.text is not None:
            self._reader = text_tensors.TextReader(capabilities, capabilities.text, generation.text)
        # Of plain tokens only the first response is read tensor by tensor.
        self._plain = self._reader is None and generation.params.logprobs is None
        # What the template is made of, once there is another response to read with it.
        self._earlier: tuple[bytes, pb.ModelInferResponse] | None = None
        self._template: ResponseTemplate | None = None
        # What is given the deltas behind the first.
        self._take: Callable[[TokenDelta], bool]
        self._any_aside = aside
        self._aside = aside if generation.params.logprobs else None

    @property
    def tells_reuse(self) -> bool:
        """Whether the answer says how much of the prompt was in the cache; none is not told."""
        return self._generation.params.usage and "cache_stats" in self._capabilities.inputs

    async def first(self) -> TokenDelta:
        """The first delta. Raises GatewayError."""
        response = await self.response()
        if self._aside is None:
            return self._delta(response)
        return await self._aside(partial(self._delta, response))

    async def feed_deltas(self, take: Callable[[TokenDelta], bool]) -> None:
        """Gives `take` the deltas behind the first, up to the final one or until it returns False.

        It is called where the bytes are received, and must not wait. What has arrived with the
        last one is given all the same; tokens that have arrived together go on together.
        """
        if self._finished or self._stream is None:
            raise EngineUnavailable("The inference server ended the stream early.")
        if self._aside is not None:
            await self._feed_from_logits(self._stream, self._aside, take)
            return
        self._take = take
        read = self._read_tokens
        if isinstance(self._reader, LlmapiReader):
            read = partial(self._read_texts, self._reader)
        try:
            goes_on = await self._stream.feed(read)
        except (asyncio.CancelledError, EngineUnavailable) as error:
            raise self._ended_by(error) from None
        if not goes_on:
            raise self._ended_early()

    def _read_texts(self, reader: LlmapiReader, messages: Sequence[bytes]) -> bool:
        # Each has all of the text so far, so of those that have arrived together the last will do.
        self._engine.heard = True
        take = self._take
        more, found = True, None
        for data in messages:
            if (text := reader.find(data)) is not None:
                found = data, text
                continue
            if found is not None:
                more = take(reader.more(*found)) and more
                found = None
            more = take(self._delta(self._checked(self._parsed(data)))) and more
            if self._finished:
                return False
        if found is not None:
            more = take(reader.more(*found)) and more
            self._engine.works()
        return more

    def _read_tokens(self, messages: Sequence[bytes]) -> bool:
        self._engine.heard = True
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
            more = take(self._delta(self._checked(self._parsed(data)))) and more
            if self._finished:
                return False
        if ids:
            more = take(TokenDelta(ids, False)) and more
        return more

    async def _feed_from_logits(
        self, stream: ResponseStream[bytes], aside: Aside, take: Callable[[TokenDelta], bool]
    ) -> None:
        """As `feed_deltas`. What has arrived together is worked on together; what arrives meanwhile
        waits in the stream, and behind its window in Triton."""
        messages: list[bytes] = []

        def enough(came: Sequence[bytes]) -> bool:
            messages.extend(came)
            return False

        more = True
        while more:
            messages.clear()
            try:
                goes_on = await stream.feed(enough)
            except (asyncio.CancelledError, EngineUnavailable) as error:
                raise self._ended_by(error) from None
            if not goes_on:
                raise self._ended_early()
            self._engine.heard = True
            for found in await aside(partial(self._deltas, messages)):
                if isinstance(found, str):
                    self._finished = True
                    raise from_text(found)
                self._finished = found.final
                more = take(found) and more and not self._finished

    def _deltas(self, messages: Sequence[bytes]) -> list[TokenDelta | str]:
        """Of each response its delta, or the error that it is."""
        responses = [parse_response(data) for data in messages]
        return [each.error_message or self._delta(each.infer_response) for each in responses]

    def _delta(self, response: pb.ModelInferResponse) -> TokenDelta:
        if self._reader is not None:
            delta = self._reader.delta(response)
            if delta.text or delta.finish:
                self._engine.works()
            return delta
        return tensors.token_delta(response, self._capabilities, self._generation)

    async def beams(self) -> list[TokenDelta]:
        """All beams of a beam search, best first. Raises GatewayError."""
        deltas: list[TokenDelta] = []
        while not self._finished:
            response = await self.response()
            if isinstance(self._reader, text_tensors.TextReader):
                deltas += self._reader.beams(response)
            else:
                deltas += tensors.beam_deltas(response, self._capabilities, self._generation)
        return deltas

    def _parsed(self, data: bytes) -> pb.ModelStreamInferResponse:
        response = parse_response(data)
        if self._plain and self._template is None and not response.error_message:
            self._earlier = data, response.infer_response
        if isinstance(self._reader, LlmapiReader):
            self._reader.learn(data, response.infer_response)
        return response
