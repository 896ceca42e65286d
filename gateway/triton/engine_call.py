"""One request at the engine: sent, with its adapter's weights where they are needed, and ended."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from gateway.errors import (
    AdapterDoesNotFit,
    EngineError,
    EngineSilent,
    EngineUnavailable,
    Overloaded,
    ReplicaLeft,
)
from gateway.generation import Generation, Lora
from gateway.stops import EarlyStop, StopReason
from gateway.triton import tensors
from gateway.triton.client import parse_response
from gateway.triton.events import ColdSend
from gateway.triton.failures import from_text, lora_cache_full, lora_missing
from gateway.triton.llmapi.tensors import stop_request as llmapi_stop_request
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.protobuf import pb
from gateway.triton.request import Request
from gateway.triton.silence import SILENCE_S
from gateway.triton.stream_owner import StreamOwner
from gateway.triton.transport import Message, Metadata, ResponseStream

# An adapter goes idle when its requests end: looked for ever more seldom, and not for ever.
_OVERFLOW_PAUSES_S = (0.05, 0.1, 0.2, 0.5, *[1.0] * 30)
_UNBEGUN = "The inference server did not begin with the request in time; try again shortly."


class EngineCall:
    """Used in a ``with``; `response` gives one response after the other.

    Left before the final one, for whatever reason, the engine is told to stop; that happens
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
        begin_by: float | None = None,
        on_sent: Callable[[], None] = lambda: None,
        on_left: Callable[[StopReason], EarlyStop] = EarlyStop,
    ) -> None:
        """`begin_by` is when the first response must be there, as `deadline` is when the last must,
        both times of the event loop. `on_sent` is called whenever the engine was given the request.
        Left early, `on_left` is asked for what is to be told when the engine has let go."""
        loop = asyncio.get_running_loop()
        self._engine = engine
        self._capabilities = capabilities
        self._request = request
        self._metadata = metadata
        self._generation = generation
        # An engine that reads adapters itself brings in again what it holds no more.
        self._lora = None if capabilities.reads_adapters else generation.params.lora
        self._stream: ResponseStream[bytes] | None = None
        self._on_sent = on_sent
        self._on_left = on_left
        self._stopping: EarlyStop | None = None
        self._sent = False
        self._given_at = 0.0
        self._begun_at = math.inf
        self._finished = False
        self._has_slot = False
        self._expired = False
        self._deadline = deadline
        # One timer for the stream; a timeout around each read would cost as much as parsing it.
        self._timer = loop.call_at(deadline, self._expire)
        self._since = loop.time()
        self._unbegun = False
        self._begin_timer = loop.call_at(begin_by, self._give_up) if begin_by else None
        self.answers_once = capabilities.answers_once(generation.text)
        """True if the first response is the last, whatever the client asked for."""

    @property
    def given(self) -> bool:
        """Whether the engine was given the request, and has not refused it for its adapter."""
        return self._stream is not None

    @property
    def unread(self) -> int:
        """As of the `ResponseStream`."""
        return 0 if self._stream is None else self._stream.unread

    @property
    def given_s(self) -> float:
        """For how many seconds the engine has had the request."""
        return asyncio.get_running_loop().time() - self._given_at if self.given else 0.0

    def waits_since(self, then: float) -> bool:
        """See `OpenStream`."""
        return self._begun_at <= then and not self._finished and not self.unread

    def __enter__(self) -> Self:
        self._engine.whole_answers += self.answers_once
        if not self.answers_once:
            self._engine.streams.add(self)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._engine.whole_answers -= self.answers_once
        self._engine.streams.discard(self)
        self._timer.cancel()
        self._begun()
        if self._sent and not self._finished and self._capabilities.stop is not None:
            stopping = self._leave(self._reason(error_type))
            self._give_back_slot()
            of_model = tensors.stop_request
            if self._capabilities.llmapi is not None:
                of_model = llmapi_stop_request
            stop = of_model(self._capabilities.stop, self._request.id)
            self._engine.stop(stop, stopping, self._capabilities)
        else:
            self._drop_stream()
            self._give_back_slot()

    def _leave(self, reason: StopReason) -> EarlyStop:
        """Reads no more of what the engine is to be told to stop."""
        if self._stopping is None:
            self._stopping = self._on_left(reason)
            if self._stream is not None:
                self._stream.leave(self._stopping.end)
            else:
                # It was still being sent, and nothing shows what the engine makes of it.
                self._stopping.end(freed=False)
        return self._stopping

    def _expire(self) -> None:
        """Ends a read under way, or the next one. Whoever consumes has to look at the deadline."""
        self._expired = True
        waited_s = asyncio.get_running_loop().time() - self._since
        if self._begin_timer is not None and waited_s > SILENCE_S:
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
        """Reads no more, for a timer or at the end. It is reset only where the engine would not end
        it."""
        if self._stream is None:
            return
        if self._finished:
            self._stream.leave()
        elif self._capabilities.stop is not None:
            self._leave("timeout")
        else:
            self._stream.cancel()

    def _reason(self, error_type: type[BaseException] | None) -> StopReason:
        if error_type is None:
            return "stop_string"
        # Of choices with one deadline, the first that fails by it cancels the others.
        if self._expired or self._unbegun or issubclass(error_type, TimeoutError):
            return "timeout"
        if issubclass(error_type, ReplicaLeft):
            return "moved"
        return "shutdown" if self._engine.draining else "disconnect"

    async def response(self) -> pb.ModelInferResponse:
        """The next response as it came. Raises GatewayError when it is an error, TimeoutError at
        the deadline: EngineSilent where that says something of the engine."""
        try:
            if self._stream is not None:
                response = self._parsed(await self._read(self._stream))
            else:
                if self._lora is None:
                    response = await self._begin()
                else:
                    async with asyncio.timeout_at(self._deadline):
                        response = await self._begin_with_lora(self._lora)
                # It is sent no more, and may be long.
                self._request = Request(self._request.id, ())
        except TimeoutError:
            if not self._met_silence:
                raise
            if self.answers_once and self._capabilities.llmapi is not None:
                # Silent until it ends, whatever the engine does: a token will tell.
                self._engine.doubt()
                raise
            raise EngineSilent(f"It told nobody anything for {SILENCE_S:g} s.") from None
        checked = self._checked(response)
        if self._begun_at == math.inf:
            self._begun_at = asyncio.get_running_loop().time()
        return checked

    @property
    def _met_silence(self) -> bool:
        """Whether the engine has had it for long, and has told nobody anything meanwhile.

        Waits for a slot, for another's weights and for a turn to send its own are the gateway's.
        """
        engine = self._engine
        if not self.given or engine.heard:
            return False
        now = asyncio.get_running_loop().time()
        return now - max(self._given_at, engine.heard_at) > SILENCE_S

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
        self._given_at = asyncio.get_running_loop().time()
        self._on_sent()
        if self._expired:  # meanwhile, so that nothing would end a read
            self._drop_stream()
        if self._lora is None:
            # It is not sent again, and its prompt may be long.
            self._request = Request(self._request.id, ())
        return self._stream

    async def _open(self, request: bytes | Message) -> ResponseStream[bytes]:
        return await self._engine.open(request, self._metadata, self._deadline)

    async def _next(self, stream: ResponseStream[bytes]) -> bytes | None:
        return await stream.read()

    def _parsed(self, data: bytes) -> pb.ModelStreamInferResponse:
        return parse_response(data)

    async def _read(self, stream: ResponseStream[bytes]) -> bytes:
        try:
            response = await self._next(stream)
        except (asyncio.CancelledError, EngineUnavailable) as error:
            raise self._ended_by(error) from None
        if response is None:
            raise self._ended_early()
        self._engine.heard = True
        return response

    def _ended_by(self, error: asyncio.CancelledError | EngineUnavailable) -> BaseException:
        """What a read that raised this has failed with."""
        if isinstance(error, EngineUnavailable):
            # The line is gone and with it the request; there is nobody to send a stop to.
            self._finished = True
            return error
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            if self._expired:
                return TimeoutError()
            if self._unbegun:
                return EngineUnavailable(_UNBEGUN)
        return error

    def _ended_early(self) -> EngineUnavailable:
        self._finished = True
        return EngineUnavailable("The inference server ended the stream early.")

    async def _begin_with_lora(self, lora: Lora) -> pb.ModelStreamInferResponse:
        """Sends the id alone when the engine holds the adapter, else with the weights.

        What the engine says before the first token about its adapter cache is settled here, and
        the client notices nothing.
        """
        residency = self._engine.residency
        # Else it would be tried again and again, and others would make room for it.
        most = self._capabilities.most_lora_bytes
        if most is not None and lora.nbytes > most:
            raise AdapterDoesNotFit(lora.name, lora.nbytes, most)
        for pause_s in _OVERFLOW_PAUSES_S:
            if not self._has_slot:
                await residency.room.take(lora.task_id, lora.tenant)
                self._has_slot = True
            turn = await residency.must_carry(lora.task_id, lora.tenant, lora.turn)
            if turn is not None:
                response = await self._begin_with_weights(lora, turn)
            else:
                response = await self._begin()
            if lora_missing(response.error_message):
                residency.evicted(lora.task_id)
                if turn is not None:
                    return response  # it does not know what it was just given
                self._refused()
            elif lora_cache_full(response.error_message):
                residency.room.overflow()
                self._refused()
                self._give_back_slot()
                await asyncio.sleep(pause_s)
            else:
                return response
        self._finished = True
        raise Overloaded("The engine's adapter cache stays full; try again shortly.")

    def _refused(self) -> None:
        """That attempt has ended; nothing is running until the next one is sent."""
        self._sent = False
        self._stream = None

    async def _begin_with_weights(
        self, lora: Lora, turn: AbstractAsyncContextManager[object]
    ) -> pb.ModelStreamInferResponse:
        residency = self._engine.residency
        cause = residency.cause(lora.task_id)
        started = time.perf_counter()
        response = None
        try:
            stream, nbytes = await self._send_weights(lora, turn)
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

    async def _send_weights(
        self, lora: Lora, turn: AbstractAsyncContextManager[object]
    ) -> tuple[ResponseStream[bytes], int]:
        """The stream and the bytes of the weights, which are here in turn until they are sent.

        The engine may take long to its first token, and each of many adapters be a hundred MB.
        """
        async with turn:
            weights = await lora.weights()
            stream = await self._send(tensors.with_weights(self._request, weights))
            await stream.sent()
        return stream, weights.nbytes

    def _give_back_slot(self) -> None:
        if self._has_slot and self._lora is not None:
            self._has_slot = False
            self._engine.residency.room.give_back(self._lora.task_id, self._lora.tenant)
