"""One Triton replica: what it serves, whether it is there, and generations on it."""

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
from gateway.generation import Generation
from gateway.stops import EarlyStop, StopReason
from gateway.triton import tensors, text_tensors
from gateway.triton.client import TritonClient
from gateway.triton.events import ColdSend
from gateway.triton.llmapi.proof import Proof
from gateway.triton.llmapi.tensors import generation_request as llmapi_request
from gateway.triton.mapped import MappedModel, Mapping, read_mapped_model
from gateway.triton.model_capabilities import ModelCapabilities
from gateway.triton.prefix_cache import PrefixCache
from gateway.triton.prompt_logits import PromptStream
from gateway.triton.request import Request
from gateway.triton.residency import Residency
from gateway.triton.selection import ModelSelection, Wanted, WantedMode, select_model
from gateway.triton.silence import Silence
from gateway.triton.stop_requests import StopRequests
from gateway.triton.stream_owner import OpenStream
from gateway.triton.token_stream import Aside, TokenStream
from gateway.triton.tokenizer.check import TokenizerCheck, TokenizerPolicy
from gateway.triton.tokenizer.comparison import OwnTokenizer
from gateway.triton.transport import ConnectionOptions, Message, Metadata, ResponseStream

log = logging.getLogger(__name__)

_POLL_S = 1.0
_LOOK_TIMEOUT_S = 2.0
# What answers late has answered by then, and a gateway that stood still itself has caught up.
_SECOND_LOOK_TIMEOUT_S = 1.0
_TOKENIZER_TIMEOUT_S = 5.0
# So often one with whole answers under way may leave a proof unanswered: it may just be full.
_MAX_SILENT_PROOFS = 3
_PLAIN = ConnectionOptions()
_NO_METADATA: Metadata = {}

T = TypeVar("T")


async def _at_once(work: Callable[[], T]) -> T:
    return work()


class Engine:
    """What one Triton server serves: its core model, or a text model above it.

    `mode` and `text_model` are GATEWAY_TRITON_MODE and GATEWAY_TRITON_TEXT_MODEL. `on_stop` is
    told of each generation that is sent stop requests, once. Create inside an event loop.
    """

    def __init__(
        self,
        endpoint: str,
        model: str,
        *,
        vocab_size: int,
        max_seq_len: int | None,
        on_stop: Callable[[EarlyStop], None],
        on_cold_send: Callable[[ColdSend], None],
        connection: ConnectionOptions = _PLAIN,
        mode: WantedMode = "auto",
        text_model: str | None = None,
        first_response_timeout: float | None = None,
        tokens_per_block: int = 32,
        tokenizer: OwnTokenizer | None = None,
        tokenizer_policy: TokenizerPolicy = "refuse",
    ) -> None:
        """Make an engine that has not been looked at yet; without a `tokenizer` none is compared.

        Of a model of llmapi: `first_response_timeout` is in seconds, where it streams, and
        `tokens_per_block` are those of its KV cache.
        """
        self._client = TritonClient(endpoint, connection)
        self._wanted = Wanted(
            model,
            max_seq_len,
            vocab_size,
            mode=mode,
            text_model=text_model,
            tokens_per_block=tokens_per_block,
        )
        self._on_stop = on_stop
        self.on_cold_send = on_cold_send
        self._selection: ModelSelection | None = None
        self.last_selection: ModelSelection | None = None
        """What is driven, or was when it was last there; None until it was."""
        self.on_selection: Callable[[], None] = lambda: None
        """Called when `last_selection` is another."""
        self.silence = Silence()
        self._first_response_timeout = first_response_timeout
        self._proof = Proof()
        self._warned: str | None = None
        self._tokenizer_check: TokenizerCheck | None = None
        if tokenizer is not None:
            self._tokenizer_check = TokenizerCheck(self._client, tokenizer, tokenizer_policy)
        self.whole_answers = 0
        """Requests under way whose first response is the last: of these, silence is no sign."""
        self.streams: set[OpenStream] = set()
        """The other requests under way."""
        self.heard = False
        """Whether a request has been answered anything since the last look began."""
        # So that no token has to ask for the time; it is late by a look at the most.
        self.heard_at = -math.inf
        self.lost_at = -math.inf
        """When it was last found not serving that had served, in the event loop's time."""
        self._seen_ready = asyncio.Event()
        self._why = "not asked yet"
        self._stops = StopRequests(self._client)
        self.residency = Residency()
        self.prefixes = PrefixCache()
        self.draining = False

    @property
    def ready(self) -> bool:
        """Whether the last look found a model serving."""
        return self._selection is not None

    @property
    def suspect(self) -> bool:
        """Whether it failed to answer a look, though it may just be busy, or a request, which may
        itself have been the reason."""
        return self.silence.suspect or self._proof.doubted

    @property
    def makes_no_tokens(self) -> bool:
        """True if the engine is out, or if its last proof got no token, which may show it dead."""
        chosen = self._selection
        if chosen is None:
            return True
        return chosen.capabilities.streams_llmapi and self._proof.silences > 0

    @property
    def why_not_ready(self) -> str:
        return self._why

    @property
    def selection(self) -> ModelSelection:
        """What is driven, and why. Raises EngineUnavailable while Triton is away or loading."""
        if self._selection is None:
            raise EngineUnavailable("The inference server is not ready.")
        return self._selection

    @property
    def capabilities(self) -> ModelCapabilities:
        """What is driven. Raises EngineUnavailable while Triton is away or still loading."""
        return self.selection.capabilities

    @property
    def fingerprint(self) -> str:
        """Of what is driven, or was when it was last there."""
        return self.last_selection.capabilities.fingerprint if self.last_selection else ""

    async def wait_ready(self) -> None:
        """Returns once the model has been seen serving."""
        await self._seen_ready.wait()

    async def watch(self) -> None:
        """Keeps `ready` and `capabilities` true; runs until cancelled."""
        while True:
            try:
                await self.refresh()
            except Exception:  # whatever Triton answered, this must go on looking
                log.exception("looking at the engine failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await self._proof.wanted.wait()
            self._proof.wanted.clear()

    async def refresh(self) -> None:
        """Looks once whether the model is served and, after an absence, reads its config anew.

        A server that is only slow to answer is lost after a few looks (`Silence`). While it sends
        tokens it is not lost at all.
        """
        silence = self.silence
        silence.begun(heard=self.heard)
        if self.heard:
            self.heard_at = asyncio.get_running_loop().time()
        self.heard = False
        try:
            await self._look_twice()
        except TimeoutError:
            if not self.heard and (not self.ready or silence.sudden or silence.lost):
                self._lost(f"Triton at {self._client.endpoint} does not answer in time")
                # What it was given waits for nothing; elsewhere some of it can begin anew.
                self._client.disconnect()
        except GatewayError as error:
            silence.broken()
            why = error.why if isinstance(error, EngineUnreachable) else error.message
            self._lost(f"Triton at {self._client.endpoint}: {why}")
        else:
            silence.broken()

    async def _look_twice(self) -> None:
        """The second time where its silence is sudden. Raises TimeoutError and GatewayError."""
        try:
            await self._look(_LOOK_TIMEOUT_S)
        except TimeoutError:
            self.silence.lasts(heard=self.heard)
            if not self.silence.sudden:
                raise
            await self._look(_SECOND_LOOK_TIMEOUT_S)

    async def _look(self, within_s: float) -> None:
        chosen = self._selection
        if chosen is not None:
            async with asyncio.timeout(within_s):
                serves = await self._client.model_ready(chosen.capabilities.model)
            if not serves:
                raise EngineUnavailable(
                    f"Triton does not serve {chosen.capabilities.model!r} any more."
                )
            await self._prove(chosen.capabilities)
            if self._tokenizer_check is not None and self._tokenizer_check.due:
                # So long may what else is looked for here have to wait.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TOKENIZER_TIMEOUT_S):
                        compared = await self._compare_tokenizers(chosen)
                        if self._selection == chosen:  # it was not lost meanwhile
                            self._selection = compared
                            self._warn(compared)
            if not chosen.makeshift or not await self._client.model_ready(self._wanted.core):
                return
        selection = await select_model(self._client, self._wanted)
        if selection == self._selection:  # another look was as quick
            return
        await self._prove(selection.capabilities)
        selection = await self._compare_tokenizers(selection)
        if selection == self._selection:  # or was while this one waited for a token
            return
        self._proof.doubted = False
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
        """The selection with what is odd about its tokenizer. Raises EngineUnavailable for one that
        is not to be served."""
        if self._tokenizer_check is None:
            return selection
        odd = await self._tokenizer_check.check(
            self._wanted.core, selection.capabilities, ready=self.ready
        )
        return replace(selection, tokenizer_warning=odd)

    def _warn(self, selection: ModelSelection) -> None:
        """Log what operators should know of the selection, if it is new."""
        if selection.warning is not None and selection.warning != self._warned:
            log.warning("%s: %s", self._client.endpoint, selection.warning)
        self._warned = selection.warning

    async def _prove(self, capabilities: ModelCapabilities) -> None:
        """Raises EngineUnavailable for a model of llmapi whose engine is dead."""
        if capabilities.llmapi is None:
            return
        await self._proof.find(
            partial(self._stream, capabilities),
            self._client.disconnect,
            partial(self._silence_tells, capabilities),
            in_use=self.ready,
        )

    def _silence_tells(self, capabilities: ModelCapabilities, since: float) -> bool:
        """Return True if the engine must be dead, as no request has got a token since then.

        One that answers at the end may just be busy: with long answers, and full. But it would go
        on with streams that it had begun, and not be full for ever.
        """
        if not self.ready:
            return True
        if not capabilities.streams_llmapi:
            return False
        return (
            not self.whole_answers
            or self._proof.silences >= _MAX_SILENT_PROOFS
            or any(stream.waits_since(since) for stream in self.streams)
        )

    def works(self) -> None:
        self._proof.works()

    def doubt(self) -> None:
        self._proof.doubt()

    def _lost(self, why: str) -> None:
        if self._selection is not None or why != self._why:
            log.warning("engine not ready: %s", why)
        if self._selection is not None:
            self.lost_at = asyncio.get_running_loop().time()
            self._proof.doubted = True
            if self._tokenizer_check is not None:
                self._tokenizer_check.begin_anew()
        self._selection = None
        self.residency.restarted()
        self.prefixes.forget()
        self._why = why

    def generate(
        self,
        generation: Generation,
        deadline: float,
        metadata: Metadata = _NO_METADATA,
        aside: Aside = _at_once,
        on_sent: Callable[[], None] = lambda: None,
        on_left: Callable[[StopReason], EarlyStop] = EarlyStop,
    ) -> TokenStream:
        """Token deltas of one generation, as a context manager that stops what is left early.

        Reading raises TimeoutError from `deadline` on, a time of the event loop. `metadata` goes
        with the call; logits are worked on `aside`. `on_sent` is called once the engine was given
        it. Of one that is left early `on_left` is asked for what is to be told when the engine has
        let go.
        """
        capabilities = self.capabilities
        if (generation.text is None) is not (capabilities.text is None):
            raise EngineUnavailable("The inference server has just changed; try again.")
        begin_by = None
        streams = capabilities.llmapi is not None and not capabilities.answers_once(generation.text)
        if self._first_response_timeout is not None and streams:
            begin_by = asyncio.get_running_loop().time() + self._first_response_timeout
        return self._stream(
            *(capabilities, generation, deadline, metadata, aside, begin_by), on_sent, on_left
        )

    def _stream(
        self,
        capabilities: ModelCapabilities,
        generation: Generation,
        deadline: float,
        metadata: Metadata = _NO_METADATA,
        aside: Aside = _at_once,
        begin_by: float | None = None,
        on_sent: Callable[[], None] = lambda: None,
        on_left: Callable[[StopReason], EarlyStop] = EarlyStop,
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
            aside=aside,
            begin_by=begin_by,
            on_sent=on_sent,
            on_left=on_left,
        )

    async def prompt_logprobs(
        self,
        generation: Generation,
        deadline: float,
        metadata: Metadata = _NO_METADATA,
        aside: Aside = _at_once,
        on_sent: Callable[[], None] = lambda: None,
        on_left: Callable[[StopReason], EarlyStop] = EarlyStop,
    ) -> list[TokenLogprob]:
        """Log probabilities of the prompt's tokens, from one run over it. Raises TimeoutError."""
        capabilities = self.capabilities
        request = tensors.context_request(capabilities, generation)
        with PromptStream(
            engine=self,
            capabilities=capabilities,
            request=request,
            generation=generation,
            deadline=deadline,
            metadata=metadata,
            aside=aside,
            on_sent=on_sent,
            on_left=on_left,
        ) as stream:
            return await stream.logprobs()

    def stop(self, request: Request, stopping: EarlyStop, model: ModelCapabilities) -> None:
        """As of `StreamOwner`."""
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

    async def mapped_model(self, mapping: Mapping) -> MappedModel:
        """Another model of the same server. Raises EngineUnavailable where it is not served, and
        EngineError saying what of the mapping does not fit it."""
        return read_mapped_model(mapping, await self._client.model_config(mapping.model))

    async def infer_once(self, request: bytes, timeout_s: float, metadata: Metadata) -> bytes:
        """As `TritonClient.infer_once`."""
        return await self._client.infer_once(request, timeout_s, metadata=metadata)

    async def close(self) -> None:
        """Waits for stop requests under way, then closes the connection."""
        await self._stops.close()
        await self._client.close()
