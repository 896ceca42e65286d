"""Attempts to run a generation: on one replica and, if that replica fails, on another replica.

If a replica fails before the first token, the next one runs the generation from its start. After
the first token, the next one generates only the rest of the answer, if the answer can be resumed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from gateway.errors import (
    AdapterDoesNotFit,
    AnswerLost,
    EngineBroken,
    EngineError,
    EngineStepFailed,
    EngineUnavailable,
    GatewayError,
    InvalidRequest,
    Overloaded,
    ReplicaLeft,
)
from gateway.generation.batch import Batch
from gateway.generation.engine_request import Generation
from gateway.generation.lora import Lora
from gateway.observability.request_context import RequestContext
from gateway.scheduling.replica import Replica, ReplicaLease
from gateway.scheduling.replicas import Replicas
from gateway.triton.prefix_cache import PromptPrefixes, hash_prefixes

_MAX_FAILED_ATTEMPTS = 3
_NO_FOLDER = nullcontext()
_OVERLOAD_RETRY_S = 0.5

T = TypeVar("T")


async def _never_resume(_replica: Replica, _error: Exception) -> None:
    pass


async def attempt(
    replicas: Replicas,
    request: RequestContext,
    batch: Batch,
    index: int,
    ask: Callable[[ReplicaLease], Awaitable[T]],
    resume: Callable[[Replica, Exception], Awaitable[Generation | None]] = _never_resume,
) -> T:
    """Call `ask` with a replica, and with further replicas after failures; return its result.

    At most 3 replicas may fail without sending a token during an answer, because the request
    itself may be the cause.

    Args:
        replicas: the replicas to pick from.
        request: the request's context; its `replica` is set to the endpoint in use.
        batch: the batch that the generation belongs to.
        index: position of the generation in the batch.
        ask: runs the generation; calls ``lease.record_first_token()`` at its first token.
        resume: called when a replica fails after the first token; returns the generation to
            continue with, or None to give up.

    Raises:
        TimeoutError: the batch's deadline has passed.
        GatewayError: the last error of a replica, if no other replica is tried.
    """
    tried: list[Replica] = []
    failed = 0
    # True after the answer has left a working replica, until another replica sends a token.
    moves = False
    generation = batch.generations[index]
    lora = generation.params.lora
    prefixes = _hash_prefixes(batch, generation) if replicas.has_several else None
    came = batch.arrived_at
    while True:
        begun = generation is not batch.generations[index]
        lease = replicas.pick(request, generation, prefixes, tried, came)
        try:
            with lease, _mark_folder_in_use(lora, lease.replica):
                if asyncio.get_running_loop().time() >= batch.deadline:
                    raise TimeoutError
                return await ask(lease)
        except (GatewayError, ReplicaLeft) as error:
            if lease.has_answered:
                goes_on = isinstance(error, (EngineUnavailable, EngineBroken, ReplicaLeft))
                rest = await resume(lease.replica, error) if goes_on else None
                if rest is None:
                    raise
                # Infinity counts as "arrived after every drain": the rest of the answer never goes
                # to a drained replica.
                generation, tried, came = rest, [lease.replica], math.inf
                moves = isinstance(error, ReplicaLeft)
            elif moves:
                # The replica that was to take over the answer failed. Resume on any other replica,
                # drained ones included, instead of ending the answer.
                moves, tried, came = False, [lease.replica], batch.arrived_at
            elif begun and isinstance(error, Overloaded):
                # Retry after a pause: many answers moved to this replica at once, and an answer
                # that has started may wait until its deadline.
                await asyncio.sleep(_OVERLOAD_RETRY_S)
            elif isinstance(error, (EngineUnavailable, Overloaded, AdapterDoesNotFit)) or (
                begun and isinstance(error, EngineBroken)
            ):
                tried.append(lease.replica)
                failed += 1
                # Wait for another replica only after a failure. A full replica is a sign of load:
                # if no other replica is available now, raise the error at once.
                full = isinstance(error, (Overloaded, AdapterDoesNotFit))
                wait_until = 0.0 if full else batch.deadline
                if failed == _MAX_FAILED_ATTEMPTS or not await replicas.wait_for_other(
                    tried, generation, wait_until, came
                ):
                    raise
            else:
                _raise_for_client(error, generation, begun=begun)
                raise


def _raise_for_client(error: Exception, generation: Generation, *, begun: bool) -> None:
    """Raise a different error for the client if it must not get `error` itself.

    If the client already has a part of the answer, the request cannot be invalid, so a replica that
    refuses the rest makes the answer count as lost. A failed engine step is reported as the fault
    of a request with a guide. In all other cases, this function returns.
    """
    if begun:
        if isinstance(error, InvalidRequest):
            raise AnswerLost("The answer could not be resumed; try again.") from error
    elif isinstance(error, EngineStepFailed) and generation.params.guide is not None:
        # Do not retry: this request could make another replica fail, too. The engine failed while
        # it started requests, so a request with a guide is the most likely cause.
        raise EngineError(
            "The engine failed when it began with this request, most likely on what its answer "
            "must match."
        ) from error


def _mark_folder_in_use(lora: Lora | None, replica: Replica) -> AbstractContextManager[object]:
    """Return a context in which the adapter's folder on the replica counts as in use."""
    if lora is None or lora.folders is None:
        return _NO_FOLDER
    return lora.folders.using(replica.endpoint)


def _hash_prefixes(batch: Batch, generation: Generation) -> PromptPrefixes:
    """Return hashes of the prompt's prefixes, by which replicas with cached prefixes are found.

    Tenants with an isolated cache get hashes of their own. All others share their hashes.
    """
    return hash_prefixes(generation, batch.caller.tenant if batch.caller.isolated_cache else "")
