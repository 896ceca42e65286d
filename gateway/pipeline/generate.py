"""From prepared generations to the deltas of their answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from gateway.deltas import FinishReason, Sink, TextDelta, TokenDelta, TokenLogprob
from gateway.errors import ClientDeadline, InvalidRequest, RequestTimeout
from gateway.generation import Batch, Generation, Running
from gateway.observability.request_context import RequestContext
from gateway.scheduling.admission import Permit
from gateway.scheduling.attempts import attempt
from gateway.scheduling.replica import ReplicaLease
from gateway.service import Service
from gateway.tokenization.piece_stream import PieceStream
from gateway.tokenization.text_stream import TextStream
from gateway.triton.token_stream import Aside


async def generate(
    service: Service,
    request: RequestContext,
    batch: Batch,
    sink: Sink,
    *,
    on_place: Callable[[], None] = lambda: None,
) -> None:
    """Gives `sink` the deltas of all choices as they come; the first error ends all.

    Each choice begins when it has a place, those of one request in their order; `on_place` is
    called for each, before the engine is asked. Cancelled, or at an
    error, it stops the engine. Raises Overloaded when it is not this request's turn in time,
    AdapterNotReady when no replica gets its adapter in time,
    RequestTimeout at its deadline, ClientDeadline where its client chose that, and InvalidRequest
    for more beams than can ever have a turn.
    """
    try:
        await service.adapter_wait.until_there(batch)
        if len(batch.generations) == 1:
            async with _permit(service, batch, 0):
                on_place()
                await _generation(service, request, batch, 0, sink)
        else:
            await _several(service, request, batch, sink, on_place)
    except TimeoutError:
        late = RequestTimeout if batch.caller.timeout_s is None else ClientDeadline
        raise late(batch.timeout_s) from None


def _permit(service: Service, batch: Batch, index: int) -> Permit:
    cost = batch.generations[index].beams or 1
    lane = service.replicas.lane_of(batch.generations[index])
    largest = service.admission.largest(lane)
    if largest is not None and cost > largest:
        raise InvalidRequest(
            f"n: found {cost} beams; allowed: {largest}, which may run at once.", param="n"
        )
    left = batch.deadline - asyncio.get_running_loop().time()
    return service.admission.permit(
        batch.caller.tenant,
        batch.caller.priority,
        cost=cost,
        wait_s=max(left, 0),
        goes_on=index > 0,
        lane=lane,
    )


async def _several(
    service: Service,
    request: RequestContext,
    batch: Batch,
    sink: Sink,
    on_place: Callable[[], None],
) -> None:
    """A task for each choice, from when it has a place."""
    late: TimeoutError | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(batch.generations)):
                try:
                    permit = await _permit(service, batch, index).__aenter__()
                except TimeoutError as error:
                    # Those that run have the same deadline, and tell the engine that it was that.
                    late = error
                    break
                on_place()
                work = _generation(service, request, batch, index, sink)
                # Not in the task: cancelled before its first step, it would never come there.
                tasks.create_task(work).add_done_callback(partial(_leave, permit))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    if late is not None:
        raise late


def _leave(permit: Permit, _task: asyncio.Task[None]) -> None:
    permit.leave()


async def _generation(
    service: Service, request: RequestContext, batch: Batch, index: int, sink: Sink
) -> None:
    if batch.generations[index].beams:
        await _beams(service, request, batch, index, sink)
    else:
        await _choice(service, request, batch, index, sink)


def _aside(service: Service, batch: Batch) -> Aside:
    """Where this tenant's logits are worked on."""
    return partial(service.logits.run, batch.caller.tenant, 0)


def _model_name(service: Service, generation: Generation) -> str:
    """What metrics call the model that answers: the adapter, or the base model."""
    lora = generation.params.lora
    return lora.name if lora else service.settings.model_name


def _begun(
    service: Service, batch: Batch, index: int, lease: ReplicaLease
) -> tuple[Generation, TextStream | PieceStream]:
    """What the replica is sent now, and what makes text of its answer."""
    sent = batch.sends(index, lease.replica.kind)
    return sent, _text_stream(service, sent)


def _answered(lease: ReplicaLease, batch: Batch, index: int) -> None:
    """The first token is there."""
    lease.answered()
    batch.meter.fingerprints[index] = lease.engine.fingerprint


def _text_stream(service: Service, generation: Generation) -> TextStream | PieceStream:
    if generation.text is None:
        return TextStream(service.prompts.vocabulary, generation)
    return PieceStream(service.prompts.tokenizer, generation)


async def _beams(
    service: Service, request: RequestContext, batch: Batch, index: int, sink: Sink
) -> None:
    """The beams of a search, each as its only delta; the engine cannot stream them apart."""
    generation = batch.generations[index]
    for beam, delta in enumerate(await _search(service, request, batch, index)):
        sink.accept(index * generation.beams + beam, delta)
    await sink.drain()


async def _search(
    service: Service, request: RequestContext, batch: Batch, index: int
) -> list[TextDelta]:
    generation, meter = batch.generations[index], batch.meter
    metrics = service.metrics

    async def ask(lease: ReplicaLease) -> tuple[Generation, list[TokenDelta]]:
        sent = batch.sends(index, lease.replica.kind)
        with lease.engine.generate(sent, batch.deadline, lease.metadata) as tokens:
            try:
                deltas = await tokens.beams()
            except (asyncio.CancelledError, TimeoutError):
                meter.untold += generation.max_tokens * generation.beams
                raise
        _answered(lease, batch, index)
        return sent, deltas

    metrics.in_flight.inc()
    try:
        sent, deltas = await attempt(service.replicas, request, batch, index, ask)
    finally:
        metrics.in_flight.dec()
    of_model = metrics.of(_model_name(service, generation))
    of_model.prompt_tokens.inc(len(generation.prompt_ids))
    texts = [_text_stream(service, sent).to_text(delta) for delta in deltas]
    # Each step is one for all beams, those that have ended early too.
    steps = max([text.tokens for text in texts])
    echo = generation.echo or ""
    texts = [text._replace(text=echo + text.text, tokens=steps) for text in texts]
    of_model.completion_tokens.inc(sum(text.tokens for text in texts))
    for text in texts:
        meter.add(text)
    return texts


async def _choice(
    service: Service, request: RequestContext, batch: Batch, index: int, sink: Sink
) -> None:
    """One generation; its last delta carries the finish reason. Raises TimeoutError."""
    generation = batch.generations[index]
    metrics = service.metrics
    text: TextStream | PieceStream
    started = time.perf_counter()
    last = TextDelta("", 0)
    of_model = metrics.of(_model_name(service, generation))

    def emit(tokens: TokenDelta) -> bool:
        """Once a token, from where its bytes are received."""
        nonlocal last
        if last.finish is not None:
            return False  # it came together with the end of a stop string
        if not last.tokens and (tokens.ids or tokens.text):
            now = time.perf_counter()
            of_model.time_to_first_token.observe(now - started)
            batch.meter.first_token = batch.meter.first_token or now
        last = text.to_text(tokens)
        return sink.accept(index, last) and last.finish is None

    def cut_short() -> None:
        """Tokens that still come are passed over, and the first of them ends the stream."""
        nonlocal last
        if last.tokens and last.finish is None:
            last = text.cut_short()
            sink.accept(index, last)

    async def ask(lease: ReplicaLease) -> None:
        nonlocal text
        sent, text = _begun(service, batch, index, lease)
        with lease.engine.generate(
            sent, batch.deadline, lease.metadata, _aside(service, batch)
        ) as tokens:
            first = await tokens.first()
            _answered(lease, batch, index)
            emit(first)
            while last.finish is None:
                await sink.drain()
                await tokens.feed_deltas(emit)

    metrics.in_flight.inc()
    of_model.prompt_tokens.inc(len(generation.prompt_ids))
    batch.meter.running[index] = Running(lambda: last.tokens, cut_short)
    try:
        if (of_prompt := await _of_prompt(service, request, batch, index)) is not None:
            sink.accept(index, of_prompt)
            await sink.drain()
            if not generation.max_tokens:
                last = of_prompt
                return
        await attempt(service.replicas, request, batch, index, ask)
        await sink.drain()
    finally:
        metrics.in_flight.dec()
        of_model.completion_tokens.inc(last.tokens)
        del batch.meter.running[index]
        batch.meter.add(last)
        of_model.duration.observe(time.perf_counter() - started)


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
    """Those of the prompt's tokens, from a run over it apart from the one that generates."""

    async def ask(lease: ReplicaLease) -> list[TokenLogprob]:
        sent = batch.sends(index, lease.replica.kind)
        found = await lease.engine.prompt_logprobs(
            sent, batch.deadline, lease.metadata, _aside(service, batch)
        )
        _answered(lease, batch, index)
        return found

    return await attempt(service.replicas, request, batch, index, ask)
