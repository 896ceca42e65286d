"""A Triton replica: its served model, its availability, and generations on it."""

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
# Timeout of a repeated poll. It is long enough for a slow answer to arrive, and for a gateway that
# was stalled itself to catch up.
_REPEATED_POLL_TIMEOUT_S = 1.0
_TOKENIZER_TIMEOUT_S = 5.0
# An engine that is working on non-streaming answers counts as dead after this many probes without
# an answer in succession: until then it may just be full.
_MAX_SILENT_PROBES = 3
_PLAIN = ConnectionOptions()
_NO_METADATA: Metadata = {}

T = TypeVar("T")


async def _run_inline(work: Callable[[], T]) -> T:
    return work()


class Engine:
    """The model that one Triton server serves: its core model, or a text model that wraps it.

    `mode` and `text_model` are GATEWAY_TRITON_MODE and GATEWAY_TRITON_TEXT_MODEL. `on_stop` is
    called once for each generation that the engine is asked to stop early. Create instances inside
    an event loop.
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
        """Make an engine that has not been polled yet.

        Args:
            tokenizer: the gateway's own, to be compared with Triton's; None for no comparison.
            first_response_timeout: seconds that a streaming llmapi model has for the first response
                to a request; None for no limit.
            tokens_per_block: block size of an llmapi model's KV cache.
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
        """The current selection or, while the server is unavailable, the last one. None until a
        model has been selected for the first time."""
        self.on_selection: Callable[[], None] = lambda: None
        """Called when `last_selection` has changed."""
        self.silence = Silence()
        self._first_response_timeout = first_response_timeout
        self._probe = TokenProbe()
        self._warned: str | None = None
        self._tokenizer_check: TokenizerCheck | None = None
        if tokenizer is not None:
            self._tokenizer_check = TokenizerCheck(self._client, tokenizer, tokenizer_policy)
        self.single_responses = 0
        """Number of running requests that get a single response, at the end. While they get nothing
        the engine may well be working."""
        self.streams: set[OpenStream] = set()
        """The running requests that get a stream of responses."""
        self.has_received = False
        """True if any request has received something since the last poll began."""
        # Event-loop time at which a poll last found `has_received` set. Polls set it, so tokens do
        # not have to read the clock. It is later than the response by one poll interval at most.
        self.received_at = -math.inf
        self.lost_at = -math.inf
        """Event-loop time at which the engine last became unavailable; minus infinity if never."""
        self._seen_ready = asyncio.Event()
        self._why = "not asked yet"
        self._stops = StopRequests(self._client)
        self.residency = Residency()
        self.prefixes = PrefixCache()
        self.draining = False

    @property
    def ready(self) -> bool:
        """Return True if the last poll found the model serving."""
        return self._selection is not None

    @property
    def suspect(self) -> bool:
        """Return True if the engine did not answer the last poll, or failed a request.

        The engine may just be busy, and the request may have failed by its own fault.
        """
        return self.silence.suspect or self._probe.is_doubted

    @property
    def makes_no_tokens(self) -> bool:
        """Return True if the engine is unavailable, or may be dead: its last probe got no token."""
        chosen = self._selection
        if chosen is None:
            return True
        return chosen.capabilities.streams_llmapi and self._probe.silences > 0

    @property
    def why_not_ready(self) -> str:
        return self._why

    @property
    def selection(self) -> ModelSelection:
        """Return the selected model, and why it was selected.

        Raises EngineUnavailable while Triton is unavailable or loading the model.
        """
        if self._selection is None:
            raise EngineUnavailable("The inference server is not ready.")
        return self._selection

    @property
    def capabilities(self) -> ModelCapabilities:
        """Return the selected model's capabilities. Raises EngineUnavailable like `selection`."""
        return self.selection.capabilities

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of the model in `last_selection`, or "" before the first."""
        return self.last_selection.capabilities.fingerprint if self.last_selection else ""

    async def wait_ready(self) -> None:
        """Return once a poll has found the model serving."""
        await self._seen_ready.wait()

    async def watch(self) -> None:
        """Poll the engine until cancelled, so that `ready` and `capabilities` stay current."""
        while True:
            try:
                await self.refresh()
            except Exception:  # polling must continue after any answer of Triton's
                log.exception("looking at the engine failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_INTERVAL_S):
                    await self._probe.requested.wait()
            self._probe.requested.clear()

    async def refresh(self) -> None:
        """Poll once whether the model is served; after an outage, read its configuration again.

        A server counts as lost after several polls without an answer (`Silence`), since it may only
        be slow. It does not count as lost while it sends tokens.
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
                # End the running requests, which wait in vain: some can resume on another replica.
                self._client.disconnect()
        except GatewayError as error:
            silence.record_answer()
            why = error.why if isinstance(error, EngineUnreachable) else error.message
            self._mark_lost(f"Triton at {self._client.endpoint}: {why}")
        else:
            silence.record_answer()

    async def _poll_with_retry(self) -> None:
        """Poll once. Poll again after a timeout if all tokens stopped together with the answers.

        Raises TimeoutError and GatewayError.
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
                # Limit the time of the comparison, as the rest of this poll waits for it.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TOKENIZER_TIMEOUT_S):
                        compared = await self._compare_tokenizers(chosen)
                        if self._selection == chosen:  # not lost in the meantime
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
        # A concurrent poll may have set the selection while this one waited for a token.
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
        """Return the selection with a warning if the model's tokenizer may not be the gateway's.

        Raises EngineUnavailable if the tokenizers differ and the operator's policy is to refuse.
        """
        if self._tokenizer_check is None:
            return selection
        odd = await self._tokenizer_check.check(
            self._preferences.core, selection.capabilities, ready=self.ready
        )
        return replace(selection, tokenizer_warning=odd)

    def _warn(self, selection: ModelSelection) -> None:
        """Log the selection's warning for operators, if it is new."""
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
        """Return True if the engine must be dead, given that no request got a token since `since`.

        `since` is a time of the event loop. A model that answers only at the end may just be busy
        with long answers, and any engine may be full. But a living engine would continue the
        streams that it has started, and would not stay full for several probes.
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
        """Return the stream of one generation's token deltas, as a context manager.

        If it is left before the end of the answer, the engine is asked to stop the generation.

        Args:
            deadline: a time of the event loop; reading raises TimeoutError from then on.
            metadata: sent with the call.
            offload: runs work on logits outside the event loop.
            on_sent: called each time the request was sent to the engine.
            on_abandon: called if the generation is left early. Returns the `EarlyStop` to end when
                the engine has released the request.
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

        The engine processes the prompt once, and generates one token. Raises GatewayError and
        TimeoutError.
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
        """Resolve `mapping` against the configuration of its model, which this server serves.

        Raises EngineUnavailable if the model is not served, EngineError if the mapping does not fit
        the configuration.
        """
        return resolve_mapping(mapping, await self._client.model_config(mapping.model))

    async def infer_once(self, request: bytes, timeout_s: float, metadata: Metadata) -> bytes:
        """Call `TritonClient.infer_once`."""
        return await self._client.infer_once(request, timeout_s, metadata=metadata)

    async def close(self) -> None:
        """Wait for running stop requests, then close the connection."""
        await self._stops.close()
        await self._client.close()
