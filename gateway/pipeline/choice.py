"""One choice that is sampled: its generation to the deltas of its answer.

What happens once a token is `Choice._emit`, called from where the engine's bytes are received.
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
from gateway.generation import Batch, Generation
from gateway.observability.request_context import RequestContext
from gateway.pipeline.continuation import Continuation
from gateway.scheduling.attempts import attempt
from gateway.scheduling.replica import Replica, ReplicaLease
from gateway.service import Service
from gateway.stops import Stopping, StopReason
from gateway.tokenization.piece_stream import PieceStream
from gateway.tokenization.text_stream import TextStream
from gateway.triton.token_stream import Aside, TokenStream

T = TypeVar("T")

# Between two looks for a replica to which a stream could go from one that is drained.
_LOOK_S = 1.0
# Charged for what is left before it came whole, up to its limit: about what one request gets.
_WHOLE_TOKENS_PER_S = 100


class Choice:
    """The generation at `index` of the batch; its last delta carries the finish reason."""

    __slots__ = (
        "_batch",
        "_continuation",
        "_generation",
        "_index",
        "_last",
        "_left",
        "_of_model",
        "_replica",
        "_request",
        "_service",
        "_sink",
        "_started",
        "_stays_until",
        "_text",
        "_whole",
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
        self._of_model = service.metrics.of(model_name(service, self._generation))
        self._started = time.perf_counter()
        self._last = TextDelta("", 0)
        self._text: TextStream | PieceStream
        self._replica: Replica
        # There was no other replica for it: it is not looked for with each token.
        self._stays_until = 0.0
        self._left: Replica | None = None
        self._whole = False

    async def run(self) -> None:
        """Raises TimeoutError at the batch's deadline, and what the engine fails with."""
        batch, index, metrics = self._batch, self._index, self._service.metrics
        metrics.in_flight.inc()
        self._of_model.prompt_tokens.inc(len(self._generation.prompt_ids))
        batch.meter.running.append(self)
        try:
            of_prompt = await _of_prompt(self._service, self._request, batch, index)
            if of_prompt is not None:
                self._sink.accept(index, of_prompt)
                if not self._generation.max_tokens:
                    await whole(self._sink, batch)
                    self._last = of_prompt
                    return
                await self._sink.drain(batch.deadline)
            try:
                await attempt(
                    *(self._service.replicas, self._request, batch, index),
                    *(self._ask, self._go_on),
                )
            except (GatewayError, TimeoutError):
                # The replica may fail between the last token and the word that it was that, or
                # behind the end at which it was cut short.
                if not self._last.tokens or not (self._last.finish or self._text.at_end):
                    raise
                self.cut_short()
            await whole(self._sink, batch)
        finally:
            metrics.in_flight.dec()
            self._of_model.completion_tokens.inc(self._last.tokens)
            batch.meter.running.remove(self)
            batch.meter.add(self._last)
            self._of_model.duration.observe(time.perf_counter() - self._started)

    async def _ask(self, lease: ReplicaLease) -> None:
        """What `attempt` asks of a replica: all of it, or what is left."""
        batch, service = self._batch, self._service
        if self._last.finish is not None:
            return  # cut short while no replica had it
        self._replica = lease.replica
        # Back where it was it stays: it has fared ill elsewhere.
        self._stays_until = math.inf if self._replica is self._left else 0.0
        sent, take = self._continuation.sent, self._emit
        if sent is None:
            sent = self._generation.for_kind(lease.replica.variant)
            self._text = text_stream(service, sent)
        elif self._continuation.again:
            take = self._emit_new
        with lease.engine.generate(
            *(sent, batch.deadline, lease.metadata, self._aside),
            on_sent=self._given,
            on_left=self._left_early,
        ) as tokens:
            self._whole = tokens.answers_once
            try:
                first = await tokens.first()
            except (asyncio.CancelledError, TimeoutError) as error:
                if tokens.answers_once:
                    # Nobody is told how many tokens it had come to.
                    came = int(tokens.given_s * _WHOLE_TOKENS_PER_S)
                    batch.meter.untold += min(came, sent.max_tokens)
                    if not (isinstance(error, EngineSilent) or lease.engine.makes_no_tokens):
                        batch.meter.whole_under_way |= tokens.given
                raise
            answered(lease, batch, self._index)
            self._left = None
            take(first)
            del first  # which would be kept until the last
            try:
                await self._follow(tokens, take)
            except (asyncio.CancelledError, TimeoutError):
                # The engine waits for no client that reads slowly. Each response is a token.
                batch.meter.untold += self._continuation.beyond(tokens.unread)
                raise
        if lease.uses_reused_tokens and tokens.tells_reuse and self._continuation.sent is None:
            stats = self._last.stats
            lease.reused_tokens = stats.reused_tokens if stats else 0

    # Methods and no partials, of which each open stream would keep three.

    def _given(self) -> None:
        self._batch.sent(self._index)

    def _left_early(self, reason: StopReason) -> Stopping:
        return _left(self._service, self._request, self._batch, reason)

    async def _aside(self, work: Callable[[], T]) -> T:
        return await self._service.logits.run(self._batch.caller.tenant, 0, work)

    async def _follow(self, tokens: TokenStream, take: Callable[[TokenDelta], bool]) -> None:
        """What comes behind the first delta."""
        while self._last.finish is None:
            if self._continuation.differs:
                raise AnswerLost("Another replica would have said something else; try again.")
            if self._replica.is_migrating and time.monotonic() >= self._stays_until:
                self._leave()
            try:
                await self._sink.drain(self._batch.deadline)
            except TimeoutError:
                raise NotTakenInTime from None
            await tokens.feed_deltas(take)

    def _emit(self, tokens: TokenDelta) -> bool:
        """Once a token, from where its bytes are received."""
        last = self._last
        if last.finish is not None:
            return False  # it came together with the end of a stop string
        if not last.tokens and (tokens.ids or tokens.text):
            now = time.perf_counter()
            if not self._whole:  # of that nobody knows when its first token was made
                self._of_model.time_to_first_token.observe(now - self._started)
                self._service.admission.record_first_token(
                    self._batch.caller.tenant, now - self._started
                )
            meter = self._batch.meter
            meter.first_token = meter.first_token or now
        ids = tokens.ids
        if len(ids) == 1:
            self._continuation.ids.append(ids[0])  # a third of what `extend` takes
        else:
            self._continuation.ids.extend(ids)
        last = self._last = self._text.to_text(tokens)
        if last.finish is not None:
            last.continued = self._continuation.sampled_anew
        return (
            self._sink.accept(self._index, last)
            and last.finish is None
            and not (self._replica.is_migrating and time.monotonic() >= self._stays_until)
        )

    def _emit_new(self, tokens: TokenDelta) -> bool:
        """As `_emit`, of an answer that is said again: what the client has is passed over."""
        new = self._continuation.new(tokens)
        if new is not None:
            return self._emit(new)
        return self._last.finish is None and not self._continuation.differs

    @property
    def tokens(self) -> int:
        """As of `Running`."""
        return self._last.tokens

    def cut_short(self) -> None:
        """As of `Running`: tokens that still come are passed over, the first ends the stream."""
        if self._last.tokens and self._last.finish is None:
            self._last = self._text.cut_short()
            self._last.continued = self._continuation.sampled_anew
            self._sink.accept(self._index, self._last)

    def _leave(self) -> None:
        """Raises ReplicaLeft where another replica can go on with it."""
        rest = self._rest(failed=False)
        # It works, and so is left for nothing that may not.
        if rest and self._service.replicas.has_other([self._replica], rest, works=True):
            self._left = self._replica
            raise ReplicaLeft
        self._stays_until = time.monotonic() + _LOOK_S

    async def _go_on(self, left: Replica, error: Exception) -> Generation | None:
        failed = not isinstance(error, ReplicaLeft)
        rest = self._rest(failed=failed)
        if rest is not None and failed:
            deadline = self._batch.deadline
            if not await self._service.replicas.wait_for_other([left], rest, deadline):
                rest = None
        if rest is not None:
            tokens = self._continuation.goes_on(rest, failed=failed)
            self._batch.meter.continued += 1
            self._service.metrics.count_continued(tokens, failed=failed)
        return rest

    def _rest(self, *, failed: bool) -> Generation | None:
        # Of an answer that came as text nobody knows the ids, whatever another kind would take.
        if not isinstance(self._text, TextStream) or self._text.at_end:
            return None
        return self._continuation.rest(failed=failed)


async def whole(sink: Sink, batch: Batch) -> None:
    """Returns once what is left of a whole answer is taken, or at the deadline: it is not late."""
    with contextlib.suppress(TimeoutError):
        await sink.drain(batch.deadline)


def aside(service: Service, batch: Batch) -> Aside:
    """Where this tenant's logits are worked on."""
    return partial(service.logits.run, batch.caller.tenant, 0)


def on_left(
    service: Service, request: RequestContext, batch: Batch
) -> Callable[[StopReason], Stopping]:
    """For an engine to tell of a generation that is left before its end."""
    return partial(_left, service, request, batch)


def _left(service: Service, request: RequestContext, batch: Batch, reason: StopReason) -> Stopping:
    stops = batch.meter.stops
    if stops is None:
        stops = batch.meter.stops = service.monitor.stops_of(request)
    if reason != "disconnect":
        return stops.begin(reason)
    return stops.begin("cancelled" if request.cancelled else reason, request.left)


def model_name(service: Service, generation: Generation) -> str:
    """What metrics call the model that answers: the adapter, or the base model."""
    lora = generation.params.lora
    return lora.name if lora else service.settings.model_name


def answered(lease: ReplicaLease, batch: Batch, index: int) -> None:
    """The first token is there."""
    lease.record_first_token()
    fingerprints, fingerprint = batch.meter.fingerprints, lease.engine.fingerprint
    if fingerprint != batch.fingerprint or index in fingerprints:
        fingerprints[index] = fingerprint


def text_stream(service: Service, generation: Generation) -> TextStream | PieceStream:
    if generation.text is None:
        return TextStream(service.prompts.vocabulary, generation)
    return PieceStream(service.prompts.tokenizer, generation)


async def _of_prompt(
    service: Service, request: RequestContext, batch: Batch, index: int
) -> TextDelta | None:
    """The echoed prompt as the first delta, None where there is no echo.

    It is the last one too when nothing is to be generated.
    """
    generation = batch.generations[index]
    if generation.prompt_logprobs is not None:
        batch.prompt_logprobs[index] = await _prompt_logprobs(service, request, batch, index)
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


async def _prompt_logprobs(
    service: Service, request: RequestContext, batch: Batch, index: int
) -> list[TokenLogprob]:
    """Those of the prompt's tokens, from a run over it apart from those that generate.

    All of its choices share it: its logits are half a megabyte a token. The first one asks, as it
    may be wanted to tell of more alternatives.
    """
    each = len(batch.generations) // batch.prompts
    first = index - index % each

    async def ask(lease: ReplicaLease) -> list[TokenLogprob]:
        sent = batch.generations[first].for_kind(lease.replica.variant)
        found = await lease.engine.prompt_logprobs(
            *(sent, batch.deadline, lease.metadata, aside(service, batch)),
            on_sent=partial(batch.sent, first),
            on_left=on_left(service, request, batch),
        )
        answered(lease, batch, first)
        return found

    async with batch.prompt_turns[first]:
        if first not in batch.prompt_logprobs:
            found = await attempt(service.replicas, request, batch, first, ask)
            batch.prompt_logprobs[first] = found
    fingerprints = batch.meter.fingerprints
    fingerprints.setdefault(index, fingerprints.get(first, batch.fingerprint))
    return batch.prompt_logprobs[first]
