"""Execution of a prepared batch: admission to the engine queue, then generation of all choices."""

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
from gateway.generation.batch import Batch
from gateway.generation.engine_request import Generation
from gateway.observability.request_context import RequestContext
from gateway.pipeline.choice import (
    Choice,
    drain_last_delta,
    make_on_abandon,
    model_name,
    record_first_token,
    text_stream,
)
from gateway.scheduling.attempts import attempt
from gateway.scheduling.fair_budget import Permit
from gateway.scheduling.replica import ReplicaLease
from gateway.service import Service

_DEADLINE_CAUSES = ("expected_wait", "too_late")


async def generate(
    service: Service,
    request: RequestContext,
    batch: Batch,
    sink: Sink,
    *,
    on_slot: Callable[[], None] = lambda: None,
) -> None:
    """Generate all choices of a batch, and pass their deltas to `sink`.

    Each choice starts when the admission queue gives it a slot; the choices get their slots in
    order. `on_slot` is called for each choice after it got its slot and before its engine request
    is sent. The first error ends all choices. An error or a cancellation also stops the requests in
    the engine.

    Raises:
        Overloaded: the request did not get a slot in time.
        AdapterNotReady: no replica got the adapter in time.
        RequestTimeout: the deadline has passed.
        ClientDeadline: a deadline that the client set has passed, or the client did not read the
            response in time.
        EndedByAdmin: an administrator ended the request.
        InvalidRequest: the request has more beams than can run at once.
    """
    watched = service.monitor.requests.begin(request, batch)
    try:
        await service.adapter_wait.wait_until_available(batch)
        if len(batch.generations) == 1:
            async with _permit(service, batch, 0):
                on_slot()
                await _generate_one(service, request, batch, 0, sink)
        else:
            await _generate_several(service, request, batch, sink, on_slot)
    except Overloaded as error:
        if error.cause is not None:
            service.metrics.queue_refusals.labels(batch.caller.tenant, error.cause).inc()
        if error.cause in _DEADLINE_CAUSES and _is_client_deadline_first(service, batch):
            raise ClientDeadlineTooNear(error.message, error.wait_s, error.cause) from None
        raise
    except TimeoutError as error:
        by_client = batch.caller.timeout_s is not None or isinstance(error, NotTakenInTime)
        late = ClientDeadline if by_client else RequestTimeout
        raise late(batch.timeout_s) from None
    except asyncio.CancelledError:
        if watched.consume_cancellation():
            raise EndedByAdmin from None
        raise
    finally:
        service.monitor.requests.remove(watched)


def _permit(service: Service, batch: Batch, index: int) -> Permit:
    cost = batch.generations[index].beams or 1
    lane = service.replicas.lane_of(batch.generations[index])
    if cost > 1:  # one slot is always possible, so skip the check
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


def _is_client_deadline_first(service: Service, batch: Batch) -> bool:
    """Return True if the client's own deadline ends the wait for a slot before any other limit."""
    caller = batch.caller
    if caller.timeout_s is None or batch.first_token_by < batch.deadline:
        return False
    others_wait_s = caller.max_expected_wait_s or math.inf
    return caller.timeout_s < min(others_wait_s, service.settings.queue_timeout)


async def _generate_several(
    service: Service,
    request: RequestContext,
    batch: Batch,
    sink: Sink,
    on_slot: Callable[[], None],
) -> None:
    """Generate several choices, each in its own task. Wait until all tasks have ended.

    The task of a choice starts as soon as the choice has a slot.
    """
    late: TimeoutError | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            for index in range(len(batch.generations)):
                try:
                    permit = await _permit(service, batch, index).__aenter__()
                except TimeoutError as error:
                    # Raise this error only after the running choices have ended. They have the same
                    # deadline, and each of them must first stop its request in the engine.
                    late = error
                    break
                on_slot()
                work = _generate_one(service, request, batch, index, sink)
                # Release the permit in a callback of the task. If the task is cancelled before its
                # first step, a `finally` inside the task is never executed.
                tasks.create_task(work).add_done_callback(partial(_release_permit, permit))
                # Let other tasks run before the next choice starts. Starting 128 choices without a
                # pause would block the event loop for 20 ms.
                await asyncio.sleep(0)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    if late is not None:
        raise late


def _release_permit(permit: Permit, _task: asyncio.Task[None]) -> None:
    permit.release()


def _generate_one(
    service: Service, request: RequestContext, batch: Batch, index: int, sink: Sink
) -> Coroutine[Any, Any, None]:
    """Return the coroutine that executes one generation: one choice, or one beam search."""
    if batch.generations[index].beams:
        return _generate_beams(service, request, batch, index, sink)
    return Choice(service, request, batch, index, sink).run()


async def _generate_beams(
    service: Service, request: RequestContext, batch: Batch, index: int, sink: Sink
) -> None:
    """Run a beam search, and give each beam to `sink` as a single delta.

    The engine cannot stream the beams, so they all arrive at the end of the search.
    """
    generation = batch.generations[index]
    for beam, delta in enumerate(await _search(service, request, batch, index)):
        sink.accept(index * generation.beams + beam, delta)
    await drain_last_delta(sink, batch)


async def _search(
    service: Service, request: RequestContext, batch: Batch, index: int
) -> list[TextDelta]:
    generation, meter = batch.generations[index], batch.meter
    metrics = service.metrics

    async def ask(lease: ReplicaLease) -> tuple[Generation, list[TokenDelta]]:
        sent = generation.for_variant(lease.replica.variant)
        with lease.engine.generate(
            *(sent, batch.deadline, lease.metadata),
            on_sent=partial(batch.record_sent, index),
            on_abandon=make_on_abandon(service, request, batch),
        ) as tokens:
            try:
                deltas = await tokens.beams()
            except (asyncio.CancelledError, TimeoutError):
                if tokens.was_sent:
                    meter.unreported_tokens += generation.max_tokens * generation.beams
                raise
        record_first_token(lease, batch, index)
        return sent, deltas

    metrics.in_flight.inc()
    try:
        sent, deltas = await attempt(service.replicas, request, batch, index, ask)
    finally:
        metrics.in_flight.dec()
    of_model = metrics.for_model(model_name(service, generation))
    of_model.prompt_tokens.inc(len(generation.prompt_ids))
    texts = [text_stream(service, sent).to_text(delta) for delta in deltas]
    # Report the number of decoding steps as the number of tokens of each beam, even if the beam
    # ended earlier, because the engine computes all beams in every step.
    steps = max([text.tokens for text in texts] + [len(delta.ids) for delta in deltas])
    echo = generation.echo or ""
    of_model.completion_tokens.inc(steps * len(texts))
    for text in texts:
        text.text, text.tokens = echo + text.text, steps
        meter.add(text)
    return texts
