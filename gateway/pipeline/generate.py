"""From prepared generations to the deltas of their answer."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from gateway.deltas import Sink, TextDelta, TokenDelta
from gateway.errors import (
    ClientDeadline,
    ClientDeadlineTooNear,
    EndedByAdmin,
    InvalidRequest,
    NotTakenInTime,
    Overloaded,
    RequestTimeout,
)
from gateway.generation import Batch, Generation
from gateway.observability.request_context import RequestContext
from gateway.pipeline.choice import Choice, answered, model_name, on_left, text_stream, whole
from gateway.scheduling.admission import Permit
from gateway.scheduling.attempts import attempt
from gateway.scheduling.replica import ReplicaLease
from gateway.service import Service

_TOO_NEAR = ("expected_wait", "too_late")


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
    called for each, before the engine is asked. Cancelled, or at an error, it stops the engine.
    Raises Overloaded when it is not this request's turn in time, AdapterNotReady when no replica
    gets its adapter in time, RequestTimeout at its deadline, ClientDeadline where its client chose
    that or did not read what there was, EndedByAdmin, and InvalidRequest for more beams than can
    ever have a turn.
    """
    watched = service.monitor.requests.begin(request, batch)
    try:
        await service.adapter_wait.wait_until_available(batch)
        if len(batch.generations) == 1:
            async with _permit(service, batch, 0):
                on_place()
                await _generated(service, request, batch, 0, sink)
        else:
            await _several(service, request, batch, sink, on_place)
    except Overloaded as error:
        if error.cause is not None:
            service.metrics.no_turn.labels(batch.caller.tenant, error.cause).inc()
        if error.cause in _TOO_NEAR and _wants_it_sooner(service, batch):
            raise ClientDeadlineTooNear(error.message, error.wait_s) from None
        raise
    except TimeoutError as error:
        by_client = batch.caller.timeout_s is not None or isinstance(error, NotTakenInTime)
        late = ClientDeadline if by_client else RequestTimeout
        raise late(batch.timeout_s) from None
    except asyncio.CancelledError:
        if watched.taken_back():
            raise EndedByAdmin from None
        raise
    finally:
        service.monitor.requests.leave(watched)


def _permit(service: Service, batch: Batch, index: int) -> Permit:
    cost = batch.generations[index].beams or 1
    lane = service.replicas.lane_of(batch.generations[index])
    if cost > 1:  # one place is within any share
        largest = service.admission.max_cost(lane)
        if largest is not None and cost > largest:
            raise InvalidRequest(
                f"n: found {cost} beams; allowed: {largest}, which may run at once.", param="n"
            )
    now = asyncio.get_running_loop().time()
    return service.admission.permit(
        batch.caller.tenant,
        batch.caller.priority,
        cost=cost,
        wait_s=max(batch.deadline - now, 0),
        first_token_s=max(batch.first_token_by - now, 0) if service.settings.refuse_early else None,
        max_expected_s=batch.caller.max_expected_wait_s,
        is_resumed=index > 0,
        lane=lane,
    )


def _wants_it_sooner(service: Service, batch: Batch) -> bool:
    """Whether it is its client's own deadline that comes first."""
    caller = batch.caller
    if caller.timeout_s is None or batch.first_token_by < batch.deadline:
        return False
    others_wait_s = caller.max_expected_wait_s or math.inf
    return caller.timeout_s < min(others_wait_s, service.settings.queue_timeout)


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
                work = _generated(service, request, batch, index, sink)
                # Not in the task: cancelled before its first step, it would never come there.
                tasks.create_task(work).add_done_callback(partial(_leave, permit))
                # They begin one by one: others have their turn between two of them.
                await asyncio.sleep(0)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    if late is not None:
        raise late


def _leave(permit: Permit, _task: asyncio.Task[None]) -> None:
    permit.release()


def _generated(
    service: Service, request: RequestContext, batch: Batch, index: int, sink: Sink
) -> Coroutine[Any, Any, None]:
    """To be awaited."""
    if batch.generations[index].beams:
        return _beams(service, request, batch, index, sink)
    return Choice(service, request, batch, index, sink).run()


async def _beams(
    service: Service, request: RequestContext, batch: Batch, index: int, sink: Sink
) -> None:
    """The beams of a search, each as its only delta; the engine cannot stream them apart."""
    generation = batch.generations[index]
    for beam, delta in enumerate(await _search(service, request, batch, index)):
        sink.accept(index * generation.beams + beam, delta)
    await whole(sink, batch)


async def _search(
    service: Service, request: RequestContext, batch: Batch, index: int
) -> list[TextDelta]:
    generation, meter = batch.generations[index], batch.meter
    metrics = service.metrics

    async def ask(lease: ReplicaLease) -> tuple[Generation, list[TokenDelta]]:
        sent = generation.for_kind(lease.replica.variant)
        with lease.engine.generate(
            *(sent, batch.deadline, lease.metadata),
            on_sent=partial(batch.sent, index),
            on_left=on_left(service, request, batch),
        ) as tokens:
            try:
                deltas = await tokens.beams()
            except (asyncio.CancelledError, TimeoutError):
                if tokens.given:
                    meter.untold += generation.max_tokens * generation.beams
                raise
        answered(lease, batch, index)
        return sent, deltas

    metrics.in_flight.inc()
    try:
        sent, deltas = await attempt(service.replicas, request, batch, index, ask)
    finally:
        metrics.in_flight.dec()
    of_model = metrics.of(model_name(service, generation))
    of_model.prompt_tokens.inc(len(generation.prompt_ids))
    texts = [text_stream(service, sent).to_text(delta) for delta in deltas]
    # Each step is one for all beams, those that have ended early too, or are cut by their text.
    steps = max([text.tokens for text in texts] + [len(delta.ids) for delta in deltas])
    echo = generation.echo or ""
    of_model.completion_tokens.inc(steps * len(texts))
    for text in texts:
        text.text, text.tokens = echo + text.text, steps
        meter.add(text)
    return texts
