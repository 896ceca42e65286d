"""Execution of one choice of a request: from the engine request to the deltas of the response.

`Choice._emit` processes one delta of the engine, which usually has one token. To save CPU time, the
function that receives the engine's bytes calls `_emit` directly.

See decision 015 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from gateway.deltas import FinishReason, Sink, TextDelta, TokenDelta, TokenLogprob
from gateway.errors import (
    AnswerLost,
    EngineSilent,
    GatewayError,
    NotTakenInTime,
    ReplicaLeft,
)
from gateway.generation.batch import Batch
from gateway.generation.engine_request import Generation
from gateway.observability.request_context import RequestContext
from gateway.pipeline.continuation import Continuation
from gateway.scheduling.attempts import attempt
from gateway.scheduling.replica import Replica, ReplicaLease
from gateway.service import Service
from gateway.stops import EarlyStop, StopReason
from gateway.tokenization.piece_stream import PieceStream
from gateway.tokenization.text_stream import TextStream
from gateway.triton.token_stream import Offload, TokenStream

T = TypeVar("T")

# Interval in seconds at which a stream on a draining replica searches for another replica.
_DRAIN_RETRY_INTERVAL_S = 1.0
# Assumed speed of an engine for one request, in tokens per second. If a non-streaming response is
# aborted, the engine does not report the number of generated tokens. The gateway then estimates
# this number from the time since the engine received the request.
_ASSUMED_TOKENS_PER_S = 100


class Choice:
    """Execution of one generation of a batch. `index` is the number of the generation, from 0.

    The deltas of the response go to `sink`. The last delta has the finish reason.
    """

    __slots__ = (
        "_answers_once",
        "_batch",
        "_continuation",
        "_generation",
        "_index",
        "_last",
        "_left_replica",
        "_model_metrics",
        "_replica",
        "_request",
        "_service",
        "_sink",
        "_started",
        "_stay_until",
        "_text",
    )

    def __init__(
        self, service: Service, request: RequestContext, batch: Batch, index: int, sink: Sink
    ) -> None:
        self._service = service
        self._request = request
        self._batch = batch
        self._index = index
        self._sink = sink
        self._generation = batch.generations[index]
        self._continuation = Continuation(self._generation, service.settings.continuations)
        self._model_metrics = service.metrics.for_model(model_name(service, self._generation))
        self._started = time.perf_counter()
        self._last = TextDelta("", 0)
        self._text: TextStream | PieceStream
        self._replica: Replica
        # While the current replica is draining: earliest time of the next search for another
        # replica. Without this pause after a failed search, each token would cause a search.
        self._stay_until = 0.0
        self._left_replica: Replica | None = None
        self._answers_once = False

    async def run(self) -> None:
        """Generate the choice to its end.

        Raises TimeoutError at the batch's deadline, and GatewayError if the engine fails.
        """
        batch, index, metrics = self._batch, self._index, self._service.metrics
        metrics.in_flight.inc()
        self._model_metrics.prompt_tokens.inc(len(self._generation.prompt_ids))
        batch.meter.running.append(self)
        try:
            of_prompt = await _build_prompt_delta(self._service, self._request, batch, index)
            if of_prompt is not None:
                self._sink.accept(index, of_prompt)
                if not self._generation.max_tokens:
                    await drain_last_delta(self._sink, batch)
                    self._last = of_prompt
                    return
                await self._sink.drain(batch.deadline)
            try:
                await attempt(
                    *(self._service.replicas, self._request, batch, index),
                    *(self._ask, self._resume),
                )
            except (GatewayError, TimeoutError):
                # If all tokens of the response have arrived, end without an error. The replica may
                # have failed after the last token, before it sent its final response. `cut_short`
                # may also have ended the choice.
                if not self._last.tokens or not (self._last.finish or self._text.at_end):
                    raise
                self.cut_short()
            await drain_last_delta(self._sink, batch)
        finally:
            metrics.in_flight.dec()
            self._model_metrics.completion_tokens.inc(self._last.tokens)
            batch.meter.running.remove(self)
            batch.meter.add(self._last)
            self._model_metrics.duration.observe(time.perf_counter() - self._started)

    async def _ask(self, lease: ReplicaLease) -> None:
        """Generate the response on the leased replica, or resume it after its last token.

        `scheduling.attempts.attempt` calls this method for each replica that it tries.
        """
        batch, service = self._batch, self._service
        if self._last.finish is not None:
            return  # the choice was cut short while it migrated to this replica
        self._replica = lease.replica
        # If a stream comes back to the replica from which it migrated, all other replicas have
        # failed. In this case, do not search for another replica again.
        self._stay_until = math.inf if self._replica is self._left_replica else 0.0
        sent, take = self._continuation.current, self._emit
        if sent is None:
            sent = self._generation.for_variant(lease.replica.variant)
            self._text = text_stream(service, sent)
        elif self._continuation.regenerates:
            take = self._emit_new
        with lease.engine.generate(
            *(sent, batch.deadline, lease.metadata, self._offload),
            on_sent=self._on_sent,
            on_abandon=self._on_abandon,
        ) as tokens:
            self._answers_once = tokens.answers_once
            try:
                first = await tokens.first()
            except (asyncio.CancelledError, TimeoutError) as error:
                if tokens.answers_once:
                    # The response is lost, so its number of tokens can only be estimated.
                    came = int(tokens.seconds_at_engine * _ASSUMED_TOKENS_PER_S)
                    batch.meter.unreported_tokens += min(came, sent.max_tokens)
                    if not (isinstance(error, EngineSilent) or lease.engine.makes_no_tokens):
                        batch.meter.aborted_single_response |= tokens.was_sent
                raise
            record_first_token(lease, batch, self._index)
            self._left_replica = None
            take(first)
            del first  # otherwise this frame would hold the delta until the response ends
            try:
                await self._follow(tokens, take)
            except (asyncio.CancelledError, TimeoutError):
                # Count one token for each response of the engine that the gateway has not read yet.
                # The engine has generated these tokens, because it does not wait for a slow client.
                batch.meter.unreported_tokens += self._continuation.tokens_not_delivered(
                    tokens.unread
                )
                raise
        if lease.uses_reused_tokens and tokens.reports_reuse and self._continuation.current is None:
            stats = self._last.stats
            lease.reused_tokens = stats.reused_tokens if stats else 0

    # Use methods as callbacks, not `partial`. Each open stream would otherwise hold three `partial`
    # objects, which take more memory.

    def _on_sent(self) -> None:
        self._batch.record_sent(self._index)

    def _on_abandon(self, reason: StopReason) -> EarlyStop:
        return _begin_stopping(self._service, self._request, self._batch, reason)

    async def _offload(self, work: Callable[[], T]) -> T:
        return await self._service.logits.run(self._batch.caller.tenant, 0, work)

    async def _follow(self, tokens: TokenStream, take: Callable[[TokenDelta], bool]) -> None:
        """Process all deltas after the first delta, until the response ends."""
        while self._last.finish is None:
            if self._continuation.has_diverged:
                raise AnswerLost("Another replica would have said something else; try again.")
            if self._replica.is_migrating and time.monotonic() >= self._stay_until:
                self._leave_if_possible()
            try:
                await self._sink.drain(self._batch.deadline)
            except TimeoutError:
                raise NotTakenInTime from None
            await tokens.feed_deltas(take)

    def _emit(self, tokens: TokenDelta) -> bool:
        """Convert one delta of the engine to text and pass it to the sink.

        The function that receives the engine's bytes calls this method for every delta. Return
        False if that function must pause before it processes the next delta.
        """
        last = self._last
        if last.finish is not None:
            return False  # the response has ended at a stop string, so drop this delta
        if not last.tokens and (tokens.ids or tokens.text):
            now = time.perf_counter()
            # The engine sends a non-streaming response at once, so the time of the first token is
            # unknown.
            if not self._answers_once:
                self._model_metrics.time_to_first_token.observe(now - self._started)
                self._service.admission.record_first_token(
                    self._batch.caller.tenant, now - self._started
                )
            meter = self._batch.meter
            meter.first_token = meter.first_token or now
        ids = tokens.ids
        if len(ids) == 1:
            self._continuation.ids.append(ids[0])  # takes a third of the time of `extend`
        else:
            self._continuation.ids.extend(ids)
        last = self._last = self._text.to_text(tokens)
        if last.finish is not None:
            last.continued = self._continuation.is_resampled
        return (
            self._sink.accept(self._index, last)
            and last.finish is None
            and not (self._replica.is_migrating and time.monotonic() >= self._stay_until)
        )

    def _emit_new(self, tokens: TokenDelta) -> bool:
        """Process a delta of a response that another replica regenerates from its first token.

        Pass only the tokens to `_emit` that the client has not received yet. Return the same as
        `_emit`.
        """
        new = self._continuation.strip_delivered(tokens)
        if new is not None:
            return self._emit(new)
        return self._last.finish is None and not self._continuation.has_diverged

    @property
    def tokens(self) -> int:
        """Number of tokens generated so far. The protocol `RunningChoice` has this property."""
        return self._last.tokens

    def cut_short(self) -> None:
        """End the choice now. The protocol `RunningChoice` has this method.

        Tokens that the engine generates later are dropped. When the first such token arrives, the
        engine request is stopped.
        """
        if self._last.tokens and self._last.finish is None:
            self._last = self._text.cut_short()
            self._last.continued = self._continuation.is_resampled
            self._sink.accept(self._index, self._last)

    def _leave_if_possible(self) -> None:
        """Raise ReplicaLeft if another replica can resume the response. Otherwise, return."""
        rest = self._remaining(failed=False)
        # The current replica still works, so migrate only to a replica whose circuit breaker is
        # closed.
        if rest and self._service.replicas.has_other([self._replica], rest, works=True):
            self._left_replica = self._replica
            raise ReplicaLeft
        self._stay_until = time.monotonic() + _DRAIN_RETRY_INTERVAL_S

    async def _resume(self, left: Replica, error: Exception) -> Generation | None:
        failed = not isinstance(error, ReplicaLeft)
        rest = self._remaining(failed=failed)
        if rest is not None and failed:
            deadline = self._batch.deadline
            if not await self._service.replicas.wait_for_other([left], rest, deadline):
                rest = None
        if rest is not None:
            tokens = self._continuation.resume(rest, failed=failed)
            self._batch.meter.resumptions += 1
            self._service.metrics.count_continued(tokens, failed=failed)
        return rest

    def _remaining(self, *, failed: bool) -> Generation | None:
        # Return None if the engine sends text instead of token ids, because such a response cannot
        # be resumed.
        if not isinstance(self._text, TextStream) or self._text.at_end:
            return None
        return self._continuation.remaining(failed=failed)


async def drain_last_delta(sink: Sink, batch: Batch) -> None:
    """Wait until the sink has sent the last delta to the client, at most until the deadline.

    A timeout raises no error, because the response is already complete.
    """
    with contextlib.suppress(TimeoutError):
        await sink.drain(batch.deadline)


def make_offload(service: Service, batch: Batch) -> Offload:
    """Return a function that runs a callback in the thread that processes logits.

    Callbacks wait in the queue of the tenant that sent the request.
    """
    return partial(service.logits.run, batch.caller.tenant, 0)


def make_on_abandon(
    service: Service, request: RequestContext, batch: Batch
) -> Callable[[StopReason], EarlyStop]:
    """Return the callback that the engine client calls when it stops a generation early.

    The callback records the stop, so that the time until the engine stops is measured.
    """
    return partial(_begin_stopping, service, request, batch)


def _begin_stopping(
    service: Service, request: RequestContext, batch: Batch, reason: StopReason
) -> EarlyStop:
    stops = batch.meter.stops
    if stops is None:
        stops = batch.meter.stops = service.monitor.make_stops(request)
    if reason != "disconnect":
        return stops.begin(reason)
    return stops.begin("cancelled" if request.cancelled else reason, request.left_at)


def model_name(service: Service, generation: Generation) -> str:
    """Return the label of the model in metrics: the adapter's name, or the base model's name."""
    lora = generation.params.lora
    return lora.name if lora else service.settings.model_name


def record_first_token(lease: ReplicaLease, batch: Batch, index: int) -> None:
    """Record the time of the first token, and the fingerprint of the model that generated it."""
    lease.record_first_token()
    fingerprints, fingerprint = batch.meter.fingerprints, lease.engine.fingerprint
    if fingerprint != batch.fingerprint or index in fingerprints:
        fingerprints[index] = fingerprint


def text_stream(service: Service, generation: Generation) -> TextStream | PieceStream:
    if generation.text is None:
        return TextStream(service.prompts.vocabulary, generation)
    return PieceStream(service.prompts.tokenizer, generation)


async def _build_prompt_delta(
    service: Service, request: RequestContext, batch: Batch, index: int
) -> TextDelta | None:
    """Return the delta that repeats the prompt at the beginning of a response with `echo`.

    Return None if the request does not set `echo`. If `max_tokens` is 0, however, always return a
    delta. This delta is the only delta of the response, and has a finish reason.
    """
    generation = batch.generations[index]
    if generation.prompt_logprobs is not None:
        batch.prompt_logprobs[index] = await _load_prompt_logprobs(service, request, batch, index)
    if generation.echo is None and generation.max_tokens:
        return None
    logprobs: list[TokenLogprob] = []
    count = generation.params.logprobs
    if generation.echo is not None and count is not None:
        offsets = service.prompts.vocabulary.offsets(generation.prompt_ids)
        entries = zip(batch.prompt_logprobs[index], offsets, strict=True)
        logprobs = [replace(e, top=e.top[:count], text_offset=at) for e, at in entries]
    finish: FinishReason | None = None if generation.max_tokens else "length"
    return TextDelta(generation.echo or "", 0, finish, logprobs=tuple(logprobs))


async def _load_prompt_logprobs(
    service: Service, request: RequestContext, batch: Batch, index: int
) -> list[TokenLogprob]:
    """Return the log probabilities of the prompt's tokens, from a separate engine request.

    All choices of a prompt share one such engine request, because the engine returns half a
    megabyte of logits per prompt token. The engine request has the parameters of the prompt's first
    choice. No other choice of the prompt needs more alternatives per token.
    """
    each = len(batch.generations) // batch.prompts
    first = index - index % each

    async def ask(lease: ReplicaLease) -> list[TokenLogprob]:
        sent = batch.generations[first].for_variant(lease.replica.variant)
        found = await lease.engine.prompt_logprobs(
            *(sent, batch.deadline, lease.metadata, make_offload(service, batch)),
            on_sent=partial(batch.record_sent, first),
            on_abandon=make_on_abandon(service, request, batch),
        )
        record_first_token(lease, batch, first)
        return found

    async with batch.prompt_locks[first]:
        if first not in batch.prompt_logprobs:
            found = await attempt(service.replicas, request, batch, first, ask)
            batch.prompt_logprobs[first] = found
    fingerprints = batch.meter.fingerprints
    fingerprints.setdefault(index, fingerprints.get(first, batch.fingerprint))
    return batch.prompt_logprobs[first]
