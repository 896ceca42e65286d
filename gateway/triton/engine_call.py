"""`EngineCall`, which sends a request to the engine, reads the responses, and can stop the request.

If the request uses a LoRA adapter, the call also uploads the adapter's weights.

See decision 002 in docs/decisions.
"""

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
from gateway.generation.engine_request import Generation
from gateway.generation.lora import Lora
from gateway.stops import EarlyStop, StopReason
from gateway.triton import tensors
from gateway.triton.client import parse_response
from gateway.triton.events import AdapterUpload
from gateway.triton.failures import from_text, is_lora_cache_full, is_lora_missing
from gateway.triton.llmapi.tensors import stop_request as llmapi_stop_request
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.protobuf import pb
from gateway.triton.request import InferRequest
from gateway.triton.silence import SILENCE_S
from gateway.triton.stream_owner import StreamOwner
from gateway.triton.transport import Message, Metadata, ResponseStream

# Pauses in seconds before a request is sent again while the engine's adapter cache is full.
_OVERFLOW_PAUSES_S = (0.05, 0.1, 0.2, 0.5, *[1.0] * 30)
_NOT_BEGUN = "The inference server did not begin with the request in time; try again shortly."


class EngineCall:
    """Context manager for one request to the engine. `response` returns the next response.

    If the context is exited before the final response, a stop request is sent to the engine.
    `__exit__` contains no await, so the stop request is sent even if the task is cancelled.

    For a BLS model, the gRPC call is cancelled instead. A stop request would need the ids of the
    requests that the BLS model sends to the engine, and the gateway does not know these ids.
    NVIDIA's BLS model ignores the cancellation.
    """

    def __init__(
        self,
        *,
        engine: StreamOwner,
        capabilities: ModelCapabilities,
        request: InferRequest,
        generation: Generation,
        deadline: float,
        metadata: Metadata,
        begin_by: float | None = None,
        on_sent: Callable[[], None] = lambda: None,
        on_abandon: Callable[[StopReason], EarlyStop] = EarlyStop,
    ) -> None:
        """Prepare the call, without sending the request.

        Args:
            engine: the engine that gets the request.
            capabilities: capabilities of the engine's model.
            request: the encoded request.
            generation: the generation that the request was made from.
            deadline: latest time for the last response, in seconds of the event loop's clock.
            metadata: gRPC metadata of the call.
            begin_by: latest time for the first response, by the same clock; None for no limit.
            on_sent: called each time the request was sent to the engine.
            on_abandon: called if the request is aborted. Returns an `EarlyStop`, whose `end` is
                called when the engine has released the request, or when this cannot be observed.
        """
        loop = asyncio.get_running_loop()
        self._engine = engine
        self._capabilities = capabilities
        self._request = request
        self._metadata = metadata
        self._generation = generation
        # Send no weights to an engine that reads adapters from disk, because it loads them itself.
        self._lora = None if capabilities.reads_adapters else generation.params.lora
        self._stream: ResponseStream[bytes] | None = None
        self._on_sent = on_sent
        self._on_abandon = on_abandon
        self._stopping: EarlyStop | None = None
        self._sent = False
        self._sent_at = 0.0
        self._first_response_at = math.inf
        self._finished = False
        self._has_slot = False
        self._expired = False
        self._deadline = deadline
        # Use one timer per stream: a timeout around each read would cost as much time as parsing.
        self._timer = loop.call_at(deadline, self._expire)
        self._since = loop.time()
        self._begin_timed_out = False
        self._begin_timer = loop.call_at(begin_by, self._give_up) if begin_by else None
        self.answers_once = capabilities.answers_once(generation.text)
        """True if the engine sends the complete answer in one response."""

    @property
    def was_sent(self) -> bool:
        """True if the request was sent to the engine.

        False again after the engine has refused the request because of its LoRA adapter, until the
        request is sent once more.
        """
        return self._stream is not None

    @property
    def unread(self) -> int:
        """Number of responses that were received but not read; see `ResponseStream`."""
        return 0 if self._stream is None else self._stream.unread

    @property
    def seconds_at_engine(self) -> float:
        """Seconds since the request was sent to the engine; 0.0 if `was_sent` is False."""
        return asyncio.get_running_loop().time() - self._sent_at if self.was_sent else 0.0

    def waits_since(self, then: float) -> bool:
        """Return True if the first response came before `then`, and no response is unread now.

        Return False after the final response. `then` is in seconds of the event loop's clock.
        """
        return self._first_response_at <= then and not self._finished and not self.unread

    def __enter__(self) -> Self:
        self._engine.single_responses += self.answers_once
        if not self.answers_once:
            self._engine.streams.add(self)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._engine.single_responses -= self.answers_once
        self._engine.streams.discard(self)
        self._timer.cancel()
        self._cancel_begin_timer()
        if self._sent and not self._finished and self._capabilities.stop is not None:
            stopping = self._abandon(self._reason(error_type))
            self._release_slot()
            of_model = tensors.stop_request
            if self._capabilities.llmapi is not None:
                of_model = llmapi_stop_request
            stop = of_model(self._capabilities.stop, self._request.id)
            self._engine.stop(stop, stopping, self._capabilities)
        else:
            self._drop_stream()
            self._release_slot()

    def _abandon(self, reason: StopReason) -> EarlyStop:
        """Stop reading the responses. The caller then sends a stop request.

        Return the request's `EarlyStop`, whose `end` is called when the engine has released the
        request, or when this cannot be observed.
        """
        if self._stopping is None:
            self._stopping = self._on_abandon(reason)
            if self._stream is not None:
                self._stream.abandon(self._stopping.end)
            else:
                # The request was not sent completely, so there is no stream whose end would show
                # that the engine has released the request. Report that the engine may still have
                # the request.
                self._stopping.end(freed=False)
        return self._stopping

    def _expire(self) -> None:
        """Stop reading at the deadline. The current or next read then raises TimeoutError."""
        self._expired = True
        waited_s = asyncio.get_running_loop().time() - self._since
        if self._begin_timer is not None and waited_s > SILENCE_S:
            self._engine.doubt()
        self._drop_stream()

    def _give_up(self) -> None:
        """Stop reading, because the first response did not come before `begin_by`.

        The current read then raises EngineUnavailable, so that the caller can send the request to
        another engine.
        """
        self._begin_timed_out = True
        self._engine.doubt()
        self._drop_stream()

    def _cancel_begin_timer(self) -> None:
        if self._begin_timer is not None:
            self._begin_timer.cancel()
            self._begin_timer = None

    def _drop_stream(self) -> None:
        """Stop reading the stream.

        Reset the stream if the engine is still generating and no stop request can be sent.
        """
        if self._stream is None:
            return
        if self._finished:
            self._stream.abandon()
        elif self._capabilities.stop is not None:
            self._abandon("timeout")
        else:
            self._stream.cancel()

    def _reason(self, error_type: type[BaseException] | None) -> StopReason:
        if error_type is None:
            return "stop_string"
        # Check `_expired`, too, because the error is not always a TimeoutError. All choices of a
        # request have the same deadline. The first choice that fails at the deadline cancels the
        # other choices, which then get CancelledError.
        if self._expired or self._begin_timed_out or issubclass(error_type, TimeoutError):
            return "timeout"
        if issubclass(error_type, ReplicaLeft):
            return "moved"
        return "shutdown" if self._engine.draining else "disconnect"

    async def response(self) -> pb.ModelInferResponse:
        """Return the next response.

        Raises:
            GatewayError: the engine has reported an error, or the connection is lost.
            TimeoutError: the deadline has passed.
            EngineSilent: the deadline has passed, and the engine has not responded to any request
                for `SILENCE_S` seconds.
        """
        try:
            if self._stream is not None:
                response = self._parse(await self._read(self._stream))
            else:
                if self._lora is None:
                    response = await self._begin()
                else:
                    async with asyncio.timeout_at(self._deadline):
                        response = await self._begin_with_lora(self._lora)
                # Free the memory of the request's tensors, because it is not sent again.
                self._request = InferRequest(self._request.id, ())
        except TimeoutError:
            if not self._is_engine_silent:
                raise
            if self.answers_once and self._capabilities.llmapi is not None:
                # Request a probe to find out if the engine is dead. The silence alone proves
                # nothing: an llmapi model sends nothing before a non-streaming answer is complete.
                self._engine.doubt()
                raise
            raise EngineSilent(f"It sent nothing to anybody for {SILENCE_S:g} s.") from None
        checked = self._check(response)
        if self._first_response_at == math.inf:
            self._first_response_at = asyncio.get_running_loop().time()
        return checked

    @property
    def _is_engine_silent(self) -> bool:
        """True if the engine has sent no response to any request for more than `SILENCE_S` seconds.

        Only the time since this request was sent to the engine counts. Before, the request may have
        waited in the gateway for a slot or an upload.
        """
        engine = self._engine
        if not self.was_sent or engine.has_received:
            return False
        now = asyncio.get_running_loop().time()
        return now - max(self._sent_at, engine.received_at) > SILENCE_S

    def _check(self, response: pb.ModelStreamInferResponse) -> pb.ModelInferResponse:
        self._cancel_begin_timer()
        if response.error_message:
            self._finished = True
            error = from_text(response.error_message)
            if self._capabilities.llmapi is not None and isinstance(error, EngineError):
                # Request a probe to find out if the engine is dead: a dead llmapi engine answers
                # every request with such an error, while Triton reports its model as ready.
                self._engine.doubt()
            raise error
        # A model without decoupled mode sends only one response. Treat this response as the last,
        # even if it is not marked as final.
        self._finished = (
            tensors.is_final(response.infer_response) or not self._capabilities.decoupled
        )
        return response.infer_response

    async def _begin(self) -> pb.ModelStreamInferResponse:
        """Send the request and wait for the first response."""
        return self._parse(await self._read(await self._send(self._request.pieces)))

    async def _send(self, request: bytes | Message) -> ResponseStream[bytes]:
        self._sent = True
        try:
            self._stream = await self._open(request)
        except EngineUnavailable:
            self._finished = True
            raise
        self._sent_at = asyncio.get_running_loop().time()
        self._on_sent()
        if self._expired:  # the timer fired before the stream existed, so end the stream here
            self._drop_stream()
        if self._lora is None:
            # Free the memory of the request's tensors, because it is not sent again.
            self._request = InferRequest(self._request.id, ())
        return self._stream

    async def _open(self, request: bytes | Message) -> ResponseStream[bytes]:
        return await self._engine.open(request, self._metadata, self._deadline)

    async def _next(self, stream: ResponseStream[bytes]) -> bytes | None:
        return await stream.read()

    def _parse(self, data: bytes) -> pb.ModelStreamInferResponse:
        return parse_response(data)

    async def _read(self, stream: ResponseStream[bytes]) -> bytes:
        try:
            response = await self._next(stream)
        except (asyncio.CancelledError, EngineUnavailable) as error:
            raise self._to_end_error(error) from None
        if response is None:
            raise self._ended_early_error()
        self._engine.has_received = True
        return response

    def _to_end_error(self, error: asyncio.CancelledError | EngineUnavailable) -> BaseException:
        """Return the error to raise if reading a response has failed with `error`.

        A read raises CancelledError in two cases: a timer of this call has ended the stream, or the
        task was cancelled. In the first case, return TimeoutError or EngineUnavailable instead.
        """
        if isinstance(error, EngineUnavailable):
            # The connection and the request are lost, so no stop request is needed.
            self._finished = True
            return error
        task = asyncio.current_task()
        if task is None or not task.cancelling():
            if self._expired:
                return TimeoutError()
            if self._begin_timed_out:
                return EngineUnavailable(_NOT_BEGUN)
        return error

    def _ended_early_error(self) -> EngineUnavailable:
        self._finished = True
        return EngineUnavailable("The inference server ended the stream early.")

    async def _begin_with_lora(self, lora: Lora) -> pb.ModelStreamInferResponse:
        """Send a request that uses a LoRA adapter, and return the first response.

        The weights are sent only if they are not in the engine's adapter cache. Otherwise, the
        request contains only the adapter's id. If the engine reports that the weights are missing
        or that its cache is full, the request is sent again.
        """
        residency = self._engine.residency
        # Refuse an adapter that is larger than the cache. Sending it would only evict other
        # adapters.
        limit = self._capabilities.max_lora_bytes
        if limit is not None and lora.nbytes > limit:
            raise AdapterDoesNotFit(lora.name, lora.nbytes, limit)
        for pause_s in _OVERFLOW_PAUSES_S:
            if not self._has_slot:
                await residency.budget.acquire(lora.task_id, lora.tenant)
                self._has_slot = True
            upload_slot = await residency.acquire_upload(
                lora.task_id, lora.tenant, lora.upload_slot
            )
            if upload_slot is not None:
                response = await self._begin_with_weights(lora, upload_slot)
            else:
                response = await self._begin()
            if is_lora_missing(response.error_message):
                residency.mark_evicted(lora.task_id)
                if upload_slot is not None:
                    return response  # the weights were sent just now, so do not retry
                self._forget_attempt()
            elif is_lora_cache_full(response.error_message):
                residency.budget.reduce_limit()
                self._forget_attempt()
                self._release_slot()
                await asyncio.sleep(pause_s)
            else:
                return response
        self._finished = True
        raise Overloaded("The engine's adapter cache stays full; try again shortly.")

    def _forget_attempt(self) -> None:
        """Prepare to send the request again after the engine has refused it."""
        self._sent = False
        self._stream = None

    async def _begin_with_weights(
        self, lora: Lora, upload_slot: AbstractAsyncContextManager[object]
    ) -> pb.ModelStreamInferResponse:
        residency = self._engine.residency
        cause = residency.upload_cause(lora.task_id)
        started = time.perf_counter()
        response = None
        try:
            stream, nbytes = await self._send_weights(lora, upload_slot)
            response = self._parse(await self._read(stream))
        finally:
            if response is None or response.error_message:
                residency.mark_not_loaded(lora.task_id)
            else:
                residency.mark_loaded(lora.task_id)
        if is_lora_cache_full(response.error_message):
            cause = "refused"
        seconds = time.perf_counter() - started
        self._engine.on_upload(AdapterUpload(lora.name, cause, nbytes, seconds))
        return response

    async def _send_weights(
        self, lora: Lora, upload_slot: AbstractAsyncContextManager[object]
    ) -> tuple[ResponseStream[bytes], int]:
        """Send the request with the weights. Return the stream and the weights' size in bytes.

        The weights may take 100 MB of memory. This memory and the upload slot are released as soon
        as the weights are sent, because the first token may come much later.
        """
        async with upload_slot:
            weights = await lora.weights()
            stream = await self._send(tensors.append_weights(self._request, weights))
            await stream.wait_sent()
        return stream, weights.nbytes

    def _release_slot(self) -> None:
        if self._has_slot and self._lora is not None:
            self._has_slot = False
            self._engine.residency.budget.release(self._lora.task_id, self._lora.tenant)
