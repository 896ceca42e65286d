"""Generations on one Triton replica: token deltas out, a stop request when abandoned."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from types import TracebackType

from tritonclient.grpc import service_pb2 as pb

from gateway.errors import EngineUnavailable, GatewayError, Overloaded
from gateway.generation import (
    ColdSend,
    Generation,
    Lora,
    StopReason,
    TokenDelta,
    TokenLogprob,
)
from gateway.triton import tensors, text_tensors
from gateway.triton.choice import Choice, Wanted, WantedMode, choose
from gateway.triton.client import TritonClient, parse_response
from gateway.triton.dialect import Dialect
from gateway.triton.failures import from_text, lora_cache_full, lora_missing
from gateway.triton.request import Request
from gateway.triton.residency import Residency
from gateway.triton.skeleton import Skeleton
from gateway.triton.transport import Message, Metadata, ResponseStream, Wire

log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 2.0
_POLL_S = 1.0
_LOOK_TIMEOUT_S = 2.0
_MISSES = 3
_PLAIN = Wire()
_NO_METADATA: Metadata = {}
# An adapter goes idle when its requests end: looked for ever more seldom, and not for ever.
_OVERFLOW_PAUSES_S = (0.05, 0.1, 0.2, 0.5, *[1.0] * 30)


class Engine:
    """What one Triton server serves: its core model, or a text model above it.

    `mode` and `text_model` are GATEWAY_TRITON_MODE and GATEWAY_TRITON_TEXT_MODEL. `on_stop` is
    told the reason of each stop request that is sent. Create inside an event loop.
    """

    def __init__(
        self,
        endpoint: str,
        model: str,
        *,
        vocab_size: int,
        max_seq_len: int | None,
        on_stop: Callable[[StopReason], None],
        on_cold_send: Callable[[ColdSend], None],
        wire: Wire = _PLAIN,
        mode: WantedMode = "auto",
        text_model: str | None = None,
    ) -> None:
        self._client = TritonClient(endpoint, wire)
        self._wanted = Wanted(model, max_seq_len, vocab_size, mode, text_model)
        self._on_stop = on_stop
        self.on_cold_send = on_cold_send
        self._choice: Choice | None = None
        self._missed = 0
        self._seen_ready = asyncio.Event()
        self._why = "not asked yet"
        self._stops: set[asyncio.Task[None]] = set()
        self.residency = Residency()
        self.draining = False

    @property
    def ready(self) -> bool:
        """Whether the last look found a model serving."""
        return self._choice is not None

    @property
    def suspect(self) -> bool:
        """Whether it did not answer when it was last looked at, though it may just be busy."""
        return self._missed > 0

    @property
    def why_not_ready(self) -> str:
        return self._why

    @property
    def choice(self) -> Choice:
        """What is driven, and why. Raises EngineUnavailable while Triton is away or loading."""
        if self._choice is None:
            raise EngineUnavailable("The inference server is not ready.")
        return self._choice

    @property
    def dialect(self) -> Dialect:
        """What is driven. Raises EngineUnavailable while Triton is away or still loading."""
        return self.choice.dialect

    async def wait_ready(self) -> None:
        """Returns once the model has been seen serving."""
        await self._seen_ready.wait()

    async def watch(self) -> None:
        """Keeps `ready` and `dialect` true; runs until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:  # whatever Triton answered, this must go on looking
                log.exception("looking at the engine failed")
            await asyncio.sleep(_POLL_S)

    async def refresh(self) -> None:
        """Looks once whether the model is served and, after an absence, reads its config anew.

        A server that is only slow to answer is lost after a few looks: it may just be busy.
        """
        try:
            await self._look()
        except TimeoutError:
            self._missed += 1
            if not self.ready or self._missed >= _MISSES:
                self._lost(f"Triton at {self._client.endpoint} does not answer in time")
                # What it was given waits for nothing; elsewhere some of it can begin anew.
                self._client.disconnect()
        except GatewayError as error:
            self._missed = 0
            self._lost(f"Triton at {self._client.endpoint}: {error.message}")
        else:
            self._missed = 0

    async def _look(self) -> None:
        chosen = self._choice
        if chosen is not None:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                serves = await self._client.model_ready(chosen.dialect.model)
            if not serves:
                raise EngineUnavailable(f"Triton does not serve {chosen.dialect.model!r} any more.")
            if not chosen.makeshift or not await self._client.model_ready(self._wanted.core):
                return
        choice = await choose(self._client, self._wanted)
        self._choice = choice
        self._seen_ready.set()
        mode, model = choice.dialect.mode, choice.dialect.model
        log.info("engine ready: %s mode on %r: %s", mode, model, choice.why)
        log.debug("dialect: %s", choice.dialect)

    def _lost(self, why: str) -> None:
        if self._choice is not None or why != self._why:
            log.warning("engine not ready: %s", why)
        self._choice = None
        self.residency.restarted()
        self._why = why

    def generate(
        self, generation: Generation, timeout_s: float, metadata: Metadata = _NO_METADATA
    ) -> TokenStream:
        """Token deltas of one generation, as a context manager that stops what is left early.

        Iterating raises TimeoutError once `timeout_s` seconds have passed. `metadata` goes with
        the call.
        """
        dialect = self.dialect
        if (generation.text is None) is not (dialect.text is None):
            raise EngineUnavailable("The inference server has just changed; try again.")
        if generation.text is None:
            request = tensors.generation_request(dialect, generation)
        else:
            request = text_tensors.text_request(dialect, generation, generation.text)
        return TokenStream(self, dialect, request, generation, timeout_s, metadata)

    async def prompt_logprobs(
        self, generation: Generation, timeout_s: float, metadata: Metadata = _NO_METADATA
    ) -> list[TokenLogprob]:
        """Log probabilities of the prompt's tokens, from one run over it. Raises TimeoutError."""
        dialect = self.dialect
        request = tensors.context_request(dialect, generation)
        with TokenStream(self, dialect, request, generation, timeout_s, metadata) as stream:
            response = await stream.response()
            return await asyncio.to_thread(tensors.context_logprobs, response, generation)

    def stop(self, request: Request, reason: StopReason) -> None:
        """Sends a stop request in a task of its own, out of reach of the caller's cancellation."""
        self._on_stop(reason)
        task = asyncio.get_running_loop().create_task(self._stop(request.data))
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def _stop(self, request: bytes) -> None:
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                stream = await self._client.infer(request)
                while await stream.read() is not None:
                    pass
        except (GatewayError, TimeoutError) as error:
            # Triton is away or stuck; the cancelled RPC is all that is left to say.
            log.warning("stop request not answered: %s", error or "timeout")

    async def open(self, request: bytes | Message, metadata: Metadata) -> ResponseStream[bytes]:
        return await self._client.stream(request, bytes, metadata=metadata)

    async def close(self) -> None:
        """Waits for stop requests under way, then closes the connection."""
        if self._stops:
            await asyncio.wait(self._stops, timeout=_STOP_TIMEOUT_S)
        await self._client.close()


class TokenStream:
    """The answer to one generation, to be iterated inside ``with engine.generate(g) as tokens``.

    Left before the final delta, for whatever reason, the RPC is cancelled and the engine told to
    stop; both happen without an await, so that they survive any cancellation. A BLS model can only
    be cancelled: the ids of what it asks of the engine are its own.
    """

    def __init__(
        self,
        engine: Engine,
        dialect: Dialect,
        request: Request,
        generation: Generation,
        timeout_s: float,
        metadata: Metadata,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._engine = engine
        self._dialect = dialect
        self._request = request
        self._metadata = metadata
        self._generation = generation
        self._lora = generation.lora
        self._reader = None
        if dialect.text is not None and generation.text is not None:
            self._reader = text_tensors.TextReader(dialect, dialect.text, generation.text)
        # Of plain tokens only the first response is read tensor by tensor.
        self._plain = self._reader is None and generation.logprobs is None
        self._skeleton: Skeleton | None = None
        self._held: bytes | None = None
        self._stream: ResponseStream[bytes] | None = None
        self._sent = False
        self._finished = False
        self._entered = False
        self._expired = False
        # One timer for the request; a timeout around each read would cost as much as parsing it.
        self._deadline = loop.time() + timeout_s
        self._timer = loop.call_at(self._deadline, self._expire)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._stream is not None:
            self._stream.cancel()
        self._leave()
        if self._sent and not self._finished and self._dialect.stop is not None:
            stop = tensors.stop_request(self._dialect.stop, self._request.id)
            self._engine.stop(stop, self._reason(error_type))

    def _expire(self) -> None:
        """Ends a read under way, or the next one; whoever consumes is never interrupted."""
        self._expired = True
        if self._stream is not None:
            self._stream.cancel()

    def _reason(self, error_type: type[BaseException] | None) -> StopReason:
        if error_type is None:
            return "stop_string"
        if issubclass(error_type, TimeoutError):
            return "timeout"
        return "shutdown" if self._engine.draining else "disconnect"

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._finished:
            raise StopAsyncIteration
        if self._skeleton is not None and self._stream is not None:
            data = await self._read(self._stream)
            ids = self._tokens(self._skeleton, self._stream, data)
            if ids:
                return TokenDelta(ids, False)
        response = await self.response()
        if self._reader is not None:
            return self._reader.delta(response)
        return tensors.token_delta(response, self._dialect, self._generation)

    def _tokens(
        self, skeleton: Skeleton, stream: ResponseStream[bytes], data: bytes | None
    ) -> list[int]:
        """The id in `data` and those that have arrived behind it; nothing is waited for.

        The first response that is of another kind is held for `response`.
        """
        ids = []
        while data is not None:
            token = skeleton.token(data)
            if token is None:
                self._held = data
                break
            ids.append(token)
            data = stream.read_nowait()
        return ids

    async def beams(self) -> list[TokenDelta]:
        """All beams of a beam search, best first. Raises GatewayError."""
        deltas: list[TokenDelta] = []
        while not self._finished:
            response = await self.response()
            if self._reader is not None:
                deltas += self._reader.beams(response)
            else:
                deltas += tensors.beam_deltas(response, self._dialect, self._generation)
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
                    response = await self._begin(self._request.data)
        if response.error_message:
            self._finished = True
            raise from_text(response.error_message)
        # Without decoupling there is one response, whether it says so or not.
        self._finished = tensors.is_final(response.infer_response) or not self._dialect.decoupled
        return response.infer_response

    async def _begin(self, request: bytes | Message) -> pb.ModelStreamInferResponse:
        """Sends the request and waits for the first response."""
        self._sent = True
        try:
            self._stream = await self._engine.open(request, self._metadata)
        except EngineUnavailable:
            self._finished = True
            raise
        return self._parsed(await self._read(self._stream))

    def _parsed(self, data: bytes) -> pb.ModelStreamInferResponse:
        response = parse_response(data)
        if self._plain and self._skeleton is None and not response.error_message:
            self._skeleton = Skeleton.of(data, response.infer_response)
        return response

    async def _read(self, stream: ResponseStream[bytes]) -> bytes:
        if self._held is not None:
            data, self._held = self._held, None
            return data
        try:
            response = await stream.read()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._expired and (task is None or not task.cancelling()):
                raise TimeoutError from None
            raise
        except EngineUnavailable:
            # The line is gone and with it the request; there is nobody to send a stop to.
            self._finished = True
            raise
        if response is None:
            self._finished = True
            raise EngineUnavailable("The inference server ended the stream early.")
        return response

    async def _begin_with_lora(self, lora: Lora) -> pb.ModelStreamInferResponse:
        """Sends the id alone when the engine holds the adapter, else with the weights.

        What the engine says before the first token about its adapter cache is settled here, and
        the client notices nothing.
        """
        residency = self._engine.residency
        await residency.enter(lora.task_id)
        self._entered = True
        for pause_s in _OVERFLOW_PAUSES_S:
            carries = await residency.must_carry(lora.task_id)
            if carries:
                response = await self._begin_with_weights(lora)
            else:
                response = await self._begin(self._request.data)
            if lora_missing(response.error_message):
                residency.evicted(lora.task_id)
                if carries:
                    return response  # it does not know what it was just given
            elif lora_cache_full(response.error_message):
                residency.overflow()
                self._leave()
                await asyncio.sleep(pause_s)
                await residency.enter(lora.task_id)
                self._entered = True
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
            weights = await lora.weights()
            request = tensors.with_weights(self._request, weights)
            response = await self._begin(request)
        finally:
            if response is None or response.error_message:
                residency.not_loaded(lora.task_id)
            else:
                residency.loaded(lora.task_id)
        if lora_cache_full(response.error_message):
            cause = "refused"
        seconds = time.perf_counter() - started
        self._engine.on_cold_send(ColdSend(lora.name, cause, weights.nbytes, seconds))
        return response

    def _leave(self) -> None:
        if self._entered and self._lora is not None:
            self._entered = False
            self._engine.residency.leave(self._lora.task_id)
