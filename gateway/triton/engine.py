"""`Engine`, which polls the model on one Triton server and runs generations on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from gateway.deltas import TokenLogprob
from gateway.errors import AdapterNotReady, EngineUnavailable, EngineUnreachable, GatewayError
from gateway.generation.engine_request import Generation
from gateway.stops import EarlyStop, StopReason
from gateway.triton import tensors, text_tensors
from gateway.triton.client import TritonClient
from gateway.triton.events import AdapterUpload
from gateway.triton.llmapi.tensors import generation_request as llmapi_request
from gateway.triton.llmapi.token_probe import TokenProbe
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.prefix_cache import PrefixCache
from gateway.triton.prompt_logits import PromptStream
from gateway.triton.request import InferRequest
from gateway.triton.residency import Residency
from gateway.triton.selection import ModelPreferences, ModelSelection, ModeSetting, select_model
from gateway.triton.silence import Silence
from gateway.triton.stop_requests import StopRequests
from gateway.triton.stream_owner import OpenStream
from gateway.triton.tensor_mapping import ResolvedMapping, TensorMapping, resolve_mapping
from gateway.triton.token_stream import Offload, TokenStream
from gateway.triton.tokenizer.check import TokenizerCheck, TokenizerPolicy
from gateway.triton.tokenizer.comparison import OwnTokenizer
from gateway.triton.transport import ConnectionOptions, Message, Metadata, ResponseStream

log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0
_POLL_TIMEOUT_S = 2.0
# Timeout in seconds of the second poll, which follows a poll that timed out. The second poll
# succeeds if the server was only slow for a moment, or if the first poll timed out only because
# this gateway's own event loop was blocked.
_REPEATED_POLL_TIMEOUT_S = 1.0
_TOKENIZER_TIMEOUT_S = 5.0
# Number of consecutive probes without a token after which an engine counts as dead even if it runs
# requests with non-streaming answers. After fewer probes, it may just be busy with these requests.
_MAX_SILENT_PROBES = 3
_PLAIN = ConnectionOptions()
_NO_METADATA: Metadata = {}

T = TypeVar("T")


async def _run_inline(work: Callable[[], T]) -> T:
    return work()


class Engine:
    """Client of the model that one Triton server serves.

    The model is a core model, which takes and returns token ids, or a text model, which takes and
    returns text. Create instances in a running event loop.
    """

    def __init__(
        self,
        endpoint: str,
        model: str,
        *,
        vocab_size: int,
        max_seq_len: int | None,
        on_stop: Callable[[EarlyStop], None],
        on_upload: Callable[[AdapterUpload], None],
        connection: ConnectionOptions = _PLAIN,
        mode: ModeSetting = "auto",
        text_model: str | None = None,
        first_response_timeout: float | None = None,
        tokens_per_block: int = 32,
        tokenizer: OwnTokenizer | None = None,
        tokenizer_policy: TokenizerPolicy = "refuse",
    ) -> None:
        """Create an engine without polling the server.

        Args:
            endpoint: the Triton server's endpoint.
            model: name of the core model.
            vocab_size: number of tokens in the gateway's vocabulary.
            max_seq_len: maximum length in tokens, for models that do not report it.
            on_stop: called once for each generation that the engine is asked to stop early.
            on_upload: called after each upload of adapter weights.
            connection: options of the connection.
            mode: value of GATEWAY_TRITON_MODE.
            text_model: value of GATEWAY_TRITON_TEXT_MODEL.
            first_response_timeout: seconds that a streaming llmapi model has for the first response
                to a request; None for no limit.
            tokens_per_block: block size in tokens of an llmapi model's KV cache.
            tokenizer: the gateway's tokenizer, to be compared with Triton's; None to skip this.
            tokenizer_policy: what to do if the tokenizers differ.
        """
        self._client = TritonClient(endpoint, connection)
        self._preferences = ModelPreferences(
            model,
            max_seq_len,
            vocab_size,
            mode=mode,
            text_model=text_model,
            tokens_per_block=tokens_per_block,
        )
        self._on_stop = on_stop
        self.on_upload = on_upload
        self._selection: ModelSelection | None = None
        self.last_selection: ModelSelection | None = None
        """The model that was selected last. It remains set while the server is unavailable.

        None until a model has been selected for the first time.
        """
        self.on_selection: Callable[[], None] = lambda: None
        """Callback that is called when `last_selection` has changed."""
        self.silence = Silence()
        self._first_response_timeout = first_response_timeout
        self._probe = TokenProbe()
        self._warned: str | None = None
        self._tokenizer_check: TokenizerCheck | None = None
        if tokenizer is not None:
            self._tokenizer_check = TokenizerCheck(self._client, tokenizer, tokenizer_policy)
        self.single_responses = 0
        """Number of running requests that get a single response at their end.

        The engine may be working on them although it sends nothing."""
        self.streams: set[OpenStream] = set()
        """The running requests that get a stream of responses."""
        self.has_received = False
        """True if any request has received a response since the last poll began."""
        # Time of the last response, in seconds of the event loop's clock. Only polls update this
        # time, so that code that receives a token need not read the clock. The time is later than
        # the response by up to one poll interval.
        self.received_at = -math.inf
        self.lost_at = -math.inf
        """Time at which the engine last became unavailable, in seconds of the event loop's clock.

        Minus infinity if the engine was always available."""
        self._seen_ready = asyncio.Event()
        self._why = "not asked yet"
        self._stops = StopRequests(self._client)
        self.residency = Residency()
        self.prefixes = PrefixCache()
        self.draining = False

    @property
    def ready(self) -> bool:
        """True if the model was ready at the last poll."""
        return self._selection is not None

    @property
    def suspect(self) -> bool:
        """True if the engine may be dead: the last poll was not answered, or a request failed.

        The engine may still be healthy: a busy engine also answers late, and an invalid request
        also fails.
        """
        return self.silence.suspect or self._probe.is_doubted

    @property
    def makes_no_tokens(self) -> bool:
        """True if the engine is unavailable, or its last `TokenProbe` timed out without a token."""
        chosen = self._selection
        if chosen is None:
            return True
        return chosen.capabilities.streams_llmapi and self._probe.silences > 0

    @property
    def why_not_ready(self) -> str:
        return self._why

    @property
    def selection(self) -> ModelSelection:
        """The selected model, and why it was selected.

        Raises EngineUnavailable while Triton is unavailable or loads the model.
        """
        if self._selection is None:
            raise EngineUnavailable("The inference server is not ready.")
        return self._selection

    @property
    def capabilities(self) -> ModelCapabilities:
        """Capabilities of the selected model. Raises EngineUnavailable like `selection`."""
        return self.selection.capabilities

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model in `last_selection`; "" before the first selection."""
        return self.last_selection.capabilities.fingerprint if self.last_selection else ""

    async def wait_ready(self) -> None:
        """Wait until a poll has found the model ready for the first time."""
        await self._seen_ready.wait()

    async def watch(self) -> None:
        """Poll the engine repeatedly to keep `ready` and `capabilities` current.

        Run until cancelled.
        """
        while True:
            try:
                await self.refresh()
            except Exception:  # continue to poll after any error
                log.exception("looking at the engine failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_INTERVAL_S):
                    await self._probe.requested.wait()
            self._probe.requested.clear()

    async def refresh(self) -> None:
        """Poll the server once. If the server has become available again, select a model.

        If the poll is not answered, `Silence` decides whether the server counts as lost: a busy
        server may also answer late. A server that sends tokens never counts as lost.
        """
        silence = self.silence
        silence.begin_poll(received=self.has_received)
        if self.has_received:
            self.received_at = asyncio.get_running_loop().time()
        self.has_received = False
        try:
            await self._poll_with_retry()
        except TimeoutError:
            if not self.has_received and (not self.ready or silence.is_sudden or silence.is_lost):
                self._mark_lost(f"Triton at {self._client.endpoint} does not answer in time")
                # End the running requests, so that they fail now or resume on another replica.
                self._client.disconnect()
        except GatewayError as error:
            silence.record_answer()
            why = error.why if isinstance(error, EngineUnreachable) else error.message
            self._mark_lost(f"Triton at {self._client.endpoint}: {why}")
        else:
            silence.record_answer()

    async def _poll_with_retry(self) -> None:
        """Poll the server. If the poll times out in a "sudden" silence, poll once more.

        In a sudden silence, the server has sent tokens until shortly before the poll, but none
        since (see `Silence`).

        Raise TimeoutError if the server does not answer, and GatewayError if it is unavailable.
        """
        try:
            await self._poll(_POLL_TIMEOUT_S)
        except TimeoutError:
            self.silence.record_timeout(received=self.has_received)
            if not self.silence.is_sudden:
                raise
            await self._poll(_REPEATED_POLL_TIMEOUT_S)

    async def _poll(self, within_s: float) -> None:
        chosen = self._selection
        if chosen is not None:
            async with asyncio.timeout(within_s):
                serves = await self._client.model_ready(chosen.capabilities.model)
            if not serves:
                raise EngineUnavailable(
                    f"Triton does not serve {chosen.capabilities.model!r} any more."
                )
            await self._probe_engine(chosen.capabilities)
            if self._tokenizer_check is not None and self._tokenizer_check.due:
                # Limit the time of the comparison, because the next poll starts only after it.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TOKENIZER_TIMEOUT_S):
                        compared = await self._compare_tokenizers(chosen)
                        if self._selection == chosen:  # the engine was not lost in the meantime
                            self._selection = compared
                            self._warn(compared)
            if not chosen.is_provisional or not await self._client.model_ready(
                self._preferences.core
            ):
                return
        selection = await select_model(self._client, self._preferences)
        if selection == self._selection:  # a concurrent poll has already set it
            return
        await self._probe_engine(selection.capabilities)
        selection = await self._compare_tokenizers(selection)
        # A concurrent poll may have set the same selection while this poll waited for a token.
        if selection == self._selection:
            return
        self._probe.is_doubted = False
        self._selection = selection
        if selection != self.last_selection:
            self.last_selection = selection
            self.on_selection()
        self._seen_ready.set()
        mode, model = selection.capabilities.mode, selection.capabilities.model
        log.info("engine ready: %s mode on %r: %s", mode, model, selection.why)
        log.debug("capabilities: %s", selection.capabilities)
        self._warn(selection)

    async def _compare_tokenizers(self, selection: ModelSelection) -> ModelSelection:
        """Return a copy of the selection with a warning if the tokenizers may differ.

        Triton's tokenizer is compared with the gateway's tokenizer. Raise EngineUnavailable if they
        differ and the operator's policy is "refuse".
        """
        if self._tokenizer_check is None:
            return selection
        odd = await self._tokenizer_check.check(
            self._preferences.core, selection.capabilities, ready=self.ready
        )
        return replace(selection, tokenizer_warning=odd)

    def _warn(self, selection: ModelSelection) -> None:
        """Log the selection's warning for operators, unless it was logged last time."""
        if selection.warning is not None and selection.warning != self._warned:
            log.warning("%s: %s", self._client.endpoint, selection.warning)
        self._warned = selection.warning

    async def _probe_engine(self, capabilities: ModelCapabilities) -> None:
        """Raise EngineUnavailable if this is an llmapi model whose engine is dead."""
        if capabilities.llmapi is None:
            return
        await self._probe.probe(
            partial(self._stream, capabilities),
            self._client.disconnect,
            partial(self._is_silence_fatal, capabilities),
            in_use=self.ready,
        )

    def _is_silence_fatal(self, capabilities: ModelCapabilities, since: float) -> bool:
        """Return True if the engine counts as dead because no request has got a token.

        No request has got a token since the time `since`, in seconds of the event loop's clock. An
        engine that is not in use yet counts as dead. An engine in use may be busy with
        non-streaming answers, which get no token before they are complete:

        - If the model cannot stream, the engine may always be busy, so it never counts as dead.
        - If the model can stream, the engine counts as dead in three cases: no non-streaming answer
          is running, a stream with earlier tokens waits for its next token, or
          `_MAX_SILENT_PROBES` consecutive probes got no token.
        """
        if not self.ready:
            return True
        if not capabilities.streams_llmapi:
            return False
        return (
            not self.single_responses
            or self._probe.silences >= _MAX_SILENT_PROBES
            or any(stream.waits_since(since) for stream in self.streams)
        )

    def record_token(self) -> None:
        self._probe.record_token()

    def doubt(self) -> None:
        self._probe.doubt()

    def _mark_lost(self, why: str) -> None:
        if self._selection is not None or why != self._why:
            log.warning("engine not ready: %s", why)
        if self._selection is not None:
            self.lost_at = asyncio.get_running_loop().time()
            self._probe.is_doubted = True
            if self._tokenizer_check is not None:
                self._tokenizer_check.begin_anew()
        self._selection = None
        self.residency.mark_restarted()
        self.prefixes.forget()
        self._why = why

    def generate(
        self,
        generation: Generation,
        deadline: float,
        metadata: Metadata = _NO_METADATA,
        offload: Offload = _run_inline,
        on_sent: Callable[[], None] = lambda: None,
        on_abandon: Callable[[StopReason], EarlyStop] = EarlyStop,
    ) -> TokenStream:
        """Return the `TokenStream` of one generation. It is a context manager.

        If the context is exited before the end of the answer, the engine is asked to stop the
        generation.

        Args:
            generation: the engine request.
            deadline: time in seconds of the event loop's clock, after which reading raises
                TimeoutError.
            metadata: gRPC metadata of the call.
            offload: runs work on logits in another thread.
            on_sent: called each time the request was sent to the engine.
            on_abandon: called if the generation is aborted. Returns an `EarlyStop`, whose `end` is
                called when the engine has released the request, or when this cannot be observed.
        """
        capabilities = self.capabilities
        if (generation.text is None) is not (capabilities.text is None):
            raise EngineUnavailable("The inference server has just changed; try again.")
        begin_by = None
        streams = capabilities.llmapi is not None and not capabilities.answers_once(generation.text)
        if self._first_response_timeout is not None and streams:
            begin_by = asyncio.get_running_loop().time() + self._first_response_timeout
        return self._stream(
            *(capabilities, generation, deadline, metadata, offload, begin_by), on_sent, on_abandon
        )

    def _stream(
        self,
        capabilities: ModelCapabilities,
        generation: Generation,
        deadline: float,
        metadata: Metadata = _NO_METADATA,
        offload: Offload = _run_inline,
        begin_by: float | None = None,
        on_sent: Callable[[], None] = lambda: None,
        on_abandon: Callable[[StopReason], EarlyStop] = EarlyStop,
    ) -> TokenStream:
        if generation.text is None:
            request = tensors.generation_request(capabilities, generation)
        elif capabilities.llmapi is None:
            request = text_tensors.text_request(capabilities, generation, generation.text)
        else:
            lora = generation.params.lora
            folders = None if lora is None else lora.folders
            adapter = None if folders is None else folders.at(self._client.endpoint)
            if lora is not None and adapter is None:
                raise AdapterNotReady(f"The model `{lora.name}` is not there; try again shortly.")
            request = llmapi_request(capabilities, generation, generation.text, adapter)
        return TokenStream(
            engine=self,
            capabilities=capabilities,
            request=request,
            generation=generation,
            deadline=deadline,
            metadata=metadata,
            offload=offload,
            begin_by=begin_by,
            on_sent=on_sent,
            on_abandon=on_abandon,
        )

    async def prompt_logprobs(
        self,
        generation: Generation,
        deadline: float,
        metadata: Metadata = _NO_METADATA,
        offload: Offload = _run_inline,
        on_sent: Callable[[], None] = lambda: None,
        on_abandon: Callable[[StopReason], EarlyStop] = EarlyStop,
    ) -> list[TokenLogprob]:
        """Return the log probability of each token of the prompt.

        The engine processes the prompt and generates one token. Raise GatewayError if the engine
        fails, and TimeoutError at the deadline. `generate` describes the arguments.
        """
        capabilities = self.capabilities
        request = tensors.context_request(capabilities, generation)
        with PromptStream(
            engine=self,
            capabilities=capabilities,
            request=request,
            generation=generation,
            deadline=deadline,
            metadata=metadata,
            offload=offload,
            on_sent=on_sent,
            on_abandon=on_abandon,
        ) as stream:
            return await stream.logprobs()

    def stop(self, request: InferRequest, stopping: EarlyStop, model: ModelCapabilities) -> None:
        """Send a stop request; see `StreamOwner.stop`."""
        self._on_stop(stopping)
        self._stops.send(request, stopping, model)

    async def open(
        self, request: bytes | Message, metadata: Metadata, by: float
    ) -> ResponseStream[bytes]:
        return await self._client.stream(request, bytes, metadata=metadata, by=by)

    async def open_pieces(
        self, request: bytes | Message, metadata: Metadata, by: float
    ) -> ResponseStream[bytes]:
        return await self._client.pieces(request, metadata=metadata, by=by)

    async def resolve_mapping(self, mapping: TensorMapping) -> ResolvedMapping:
        """Return `mapping`, completed with the configuration of its model on this server.

        Raise EngineUnavailable if the model is not served. Raise EngineError if the mapping does
        not fit the configuration.
        """
        return resolve_mapping(mapping, await self._client.model_config(mapping.model))

    async def infer_once(self, request: bytes, timeout_s: float, metadata: Metadata) -> bytes:
        """Call `TritonClient.infer_once`."""
        return await self._client.infer_once(request, timeout_s, metadata=metadata)

    async def close(self) -> None:
        """Wait for running stop requests, then close the connection."""
        await self._stops.close()
        await self._client.close()
