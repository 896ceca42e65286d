"""The answer to one generation: token deltas out, a stop request when abandoned."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

from tritonclient.grpc import service_pb2 as pb

from gateway.deltas import TokenDelta
from gateway.errors import EngineError, EngineUnavailable, Overloaded
from gateway.generation import Generation, Lora
from gateway.triton import tensors, text_tensors
from gateway.triton.client import parse_response
from gateway.triton.events import ColdSend, StopReason
from gateway.triton.failures import from_text, lora_cache_full, lora_missing
from gateway.triton.llmapi.reader import LlmapiReader
from gateway.triton.llmapi.tensors import stop_request as llmapi_stop_request
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.request import Request
from gateway.triton.response_template import ResponseTemplate
from gateway.triton.stream_owner import StreamOwner
from gateway.triton.transport import Message, Metadata, ResponseStream

# An adapter goes idle when its requests end: looked for ever more seldom, and not for ever.
_OVERFLOW_PAUSES_S = (0.05, 0.1, 0.2, 0.5, *[1.0] * 30)
# A client may set a deadline that no engine could meet.
_SILENCE_S = 10.0
_UNBEGUN = "The inference server did not begin with the request in time; try again shortly."

T = TypeVar("T")


class Aside(Protocol):
    """Where work is done that would take too long in the event loop."""

    async def __call__(self, work: Callable[[], T]) -> T:
        """What `work` returns. Raises what it raises."""


class TokenStream:
    """The answer to one generation, to be read inside ``with engine.generate(g) as tokens``.

    Left before the final delta, for whatever reason, the engine is told to stop; that happens
    without an await, so that it survives any cancellation. A BLS model can only be cancelled:
    the ids of what it asks of the engine are its own. Upstream's does not notice.
    """

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
    ) -> None:
        """`aside` is for logits: to find the likeliest of a vocabulary takes a hundred times what
        a token takes. `begin_by` is when the first response must be there, as `deadline` is when
        the last must."""
        loop = asyncio.get_running_loop()
        self._engine = engine
        self._capabilities = capabilities
        self._request = request
        self._metadata = metadata
        self._generation = generation
        # An engine that reads adapters itself brings in again what it holds no more.
        self._lora = None if capabilities.reads_adapters else generation.params.lora
        self._reader: text_tensors.TextReader | LlmapiReader | None = None
        if capabilities.llmapi is not None:
            self._reader = LlmapiReader(
                decoupled=capabilities.decoupled, tokens_per_block=capabilities.tokens_per_block
            )
        elif capabilities.text is not None and generation.text is not None:
            self._reader = text_tensors.TextReader(capabilities, capabilities.text, generation.text)
        # Of plain tokens only the first response is read tensor by tensor.
        self._plain = self._reader is None and generation.params.logprobs is None
        self._template: ResponseTemplate | None = None
        self._any_aside = aside
        self._aside = aside if generation.params.logprobs else None
        self._stream: ResponseStream[bytes] | None = None
        self._sent = False
        self._finished = False
        self._has_slot = False
        self._expired = False
        self._deadline = deadline
        # One timer for the stream; a timeout around each read would cost as much as parsing it.
        self._timer = loop.call_at(deadline, self._expire)
        self._since = loop.time()
        self._unbegun = False
        self._begin_timer = loop.call_at(begin_by, self._give_up) if begin_by else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        self._begun()
        self._drop_stream()
        self._give_back_slot()
        if self._sent and not self._finished and self._capabilities.stop is not None:
            of_model = tensors.stop_request
            if self._capabilities.llmapi is not None:
                of_model = llmapi_stop_request
            stop = of_model(self._capabilities.stop, self._request.id)
            self._engine.stop(stop, self._reason(error_type))

    def _expire(self) -> None:
        """Ends a read under way, or the next one; whoever consumes is never interrupted."""
        self._expired = True
        waited_s = asyncio.get_running_loop().time() - self._since
        if self._begin_timer is not None and waited_s > _SILENCE_S:
            self._engine.doubt()
        self._drop_stream()

    def _give_up(self) -> None:
        """As `_expire`, of a request that another engine may begin with."""
        self._unbegun = True
        self._engine.doubt()
        self._drop_stream()

    def _begun(self) -> None:
        if self._begin_timer is not None:
            self._begin_timer.cancel()
            self._begin_timer = None

    def _drop_stream(self) -> None:
        """Reads no more. It is reset only where the engine would not end it."""
        if self._stream is None:
            return
        if self._finished or self._capabilities.stop is not None:
            self._stream.leave()
        else:
            self._stream.cancel()

    def _reason(self, error_type: type[BaseException] | None) -> StopReason:
        if error_type is None:
            return "stop_string"
        # Of choices with one deadline, the first that fails by it cancels the others.
        if self._expired or self._unbegun or issubclass(error_type, TimeoutError):
            return "timeout"
        return "shutdown" if self._engine.draining else "disconnect"

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

        def read_texts(messages: Sequence[bytes], reader: LlmapiReader) -> bool:
            # Each has all of the text so far, so of those that have arrived together the last will
            # do.
            self._engine.heard = True
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

        def read_tokens(messages: Sequence[bytes]) -> bool:
            self._engine.heard = True
            more, ids = True, []
            for data in messages:
                token = None if self._template is None else self._template.token(data)
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

        read = read_tokens
        if isinstance(self._reader, LlmapiReader):
            read = partial(read_texts, reader=self._reader)
        with self._reading():
            if not await self._stream.feed(read):
                raise EngineUnavailable("The inference server ended the stream early.")

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
            with self._reading():
                if not await stream.feed(enough):
                    raise EngineUnavailable("The inference server ended the stream early.")
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

    async def response(self) -> pb.ModelInferResponse:
        """The next response as it came. Raises GatewayError when it is an error."""
        if self._stream is not None:
            response = self._parsed(await self._read(self._stream))
        else:
            async with asyncio.timeout_at(self._deadline):
                if self._lora is not None:
                    response = await self._begin_with_lora(self._lora)
                else:
                    response = await self._begin()
        return self._checked(response)

    def _checked(self, response: pb.ModelStreamInferResponse) -> pb.ModelInferResponse:
        self._begun()
        if response.error_message:
            self._finished = True
            error = from_text(response.error_message)
            if self._capabilities.llmapi is not None and isinstance(error, EngineError):
                # A dead engine answers so whatever it is asked, and Triton calls its model ready.
                self._engine.doubt()
            raise error
        # Without decoupling there is one response, whether it says so or not.
        self._finished = (
            tensors.is_final(response.infer_response) or not self._capabilities.decoupled
        )
        return response.infer_response

    async def _begin(self) -> pb.ModelStreamInferResponse:
        """Sends the request and waits for the first response."""
        return self._parsed(await self._read(await self._send(self._request.pieces)))

    async def _send(self, request: bytes | Message) -> ResponseStream[bytes]:
        self._sent = True
        try:
            self._stream = await self._open(request)
        except EngineUnavailable:
            self._finished = True
            raise
        return self._stream

    async def _open(self, request: bytes | Message) -> ResponseStream[bytes]:
        return await self._engine.open(request, self._metadata)

    async def _next(self, stream: ResponseStream[bytes]) -> bytes | None:
        return await stream.read()

    def _parsed(self, data: bytes) -> pb.ModelStreamInferResponse:
        response = parse_response(data)
        if self._plain and self._template is None and not response.error_message:
            self._template = ResponseTemplate.of(data, response.infer_response)
        if isinstance(self._reader, LlmapiReader):
            self._reader.learn(data, response.infer_response)
        return response

    async def _read(self, stream: ResponseStream[bytes]) -> bytes:
        with self._reading():
            response = await self._next(stream)
            if response is None:
                raise EngineUnavailable("The inference server ended the stream early.")
            self._engine.heard = True
            return response

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                if self._expired:
                    raise TimeoutError from None
                if self._unbegun:
                    raise EngineUnavailable(_UNBEGUN) from None
            raise
        except EngineUnavailable:
            # The line is gone and with it the request; there is nobody to send a stop to.
            self._finished = True
            raise

    async def _begin_with_lora(self, lora: Lora) -> pb.ModelStreamInferResponse:
        """Sends the id alone when the engine holds the adapter, else with the weights.

        What the engine says before the first token about its adapter cache is settled here, and
        the client notices nothing.
        """
        residency = self._engine.residency
        await residency.take_slot(lora.task_id)
        self._has_slot = True
        for pause_s in _OVERFLOW_PAUSES_S:
            carries = await residency.must_carry(lora.task_id)
            if carries:
                response = await self._begin_with_weights(lora)
            else:
                response = await self._begin()
            if lora_missing(response.error_message):
                residency.evicted(lora.task_id)
                if carries:
                    return response  # it does not know what it was just given
            elif lora_cache_full(response.error_message):
                residency.overflow()
                self._give_back_slot()
                await asyncio.sleep(pause_s)
                await residency.take_slot(lora.task_id)
                self._has_slot = True
            else:
                return response
            # That attempt has ended; nothing is running until the next one is sent.
            self._sent = False
            self._stream = None
        self._finished = True
        raise Overloaded("The engine's adapter cache stays full; try again shortly.")

    async def _begin_with_weights(self, lora: Lora) -> pb.ModelStreamInferResponse:
        residency = self._engine.residency
        cause = residency.cause(lora.task_id)
        started = time.perf_counter()
        response = None
        try:
            stream, nbytes = await self._send_weights(lora)
            response = self._parsed(await self._read(stream))
        finally:
            if response is None or response.error_message:
                residency.not_loaded(lora.task_id)
            else:
                residency.loaded(lora.task_id)
        if lora_cache_full(response.error_message):
            cause = "refused"
        seconds = time.perf_counter() - started
        self._engine.on_cold_send(ColdSend(lora.name, cause, nbytes, seconds))
        return response

    async def _send_weights(self, lora: Lora) -> tuple[ResponseStream[bytes], int]:
        """The stream and the bytes of the weights, which are here in turn until they are sent.

        The engine may take long to its first token, and each of many adapters be a hundred MB.
        """
        async with lora.turn():
            weights = await lora.weights()
            stream = await self._send(tensors.with_weights(self._request, weights))
            await stream.sent()
        return stream, weights.nbytes

    def _give_back_slot(self) -> None:
        if self._has_slot and self._lora is not None:
            self._has_slot = False
            self._engine.residency.give_back_slot(self._lora.task_id)
