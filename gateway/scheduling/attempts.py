"""One generation on one replica; on another one when the first fails.

Before the first token it is asked for the same, behind it for what is left, where that can go on.
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
from gateway.generation import Batch, Generation, Lora
from gateway.observability.request_context import RequestContext
from gateway.scheduling.replica import Replica, ReplicaLease
from gateway.scheduling.replicas import Replicas
from gateway.triton.prefix_cache import PromptPrefixes, hash_prefixes

_ATTEMPTS = 3
_NOTHING = nullcontext()
_FULL_PAUSE_S = 0.5

T = TypeVar("T")


async def _nowhere(_replica: Replica, _error: Exception) -> None:
    pass


async def attempt(
    replicas: Replicas,
    request: RequestContext,
    batch: Batch,
    index: int,
    ask: Callable[[ReplicaLease], Awaitable[T]],
    go_on: Callable[[Replica, Exception], Awaitable[Generation | None]] = _nowhere,
) -> T:
    """What `ask` returns. Raises TimeoutError from the batch's deadline on.

    `index` is the generation's place in the batch. `ask` says ``lease.answered()`` when the first
    token is there. `go_on` is told when that replica fails behind it, and says what `ask` asks for
    next; None is the end. How many replicas may fail before a first token is bounded for all of it
    together, as it may be what they fail on.
    """
    tried: list[Replica] = []
    failed = 0
    # It has left a replica that works, and no other has answered yet.
    moves = False
    generation = batch.generations[index]
    lora = generation.params.lora
    prefixes = _prefixes(batch, generation) if replicas.several else None
    came = batch.arrived_at
    while True:
        begun = generation is not batch.generations[index]
        lease = replicas.pick(request, generation, prefixes, tried, came)
        try:
            with lease, _using(lora, lease.replica):
                if asyncio.get_running_loop().time() >= batch.deadline:
                    raise TimeoutError
                return await ask(lease)
        except (GatewayError, ReplicaLeft) as error:
            if lease.has_answered:
                goes_on = isinstance(error, (EngineUnavailable, EngineBroken, ReplicaLeft))
                rest = await go_on(lease.replica, error) if goes_on else None
                if rest is None:
                    raise
                # To a replica that is drained nothing goes that could go elsewhere.
                generation, tried, came = rest, [lease.replica], math.inf
                moves = isinstance(error, ReplicaLeft)
            elif moves:
                # Back to where it was: that it was to move must not end it.
                moves, tried, came = False, [lease.replica], batch.arrived_at
            elif begun and isinstance(error, Overloaded):
                # Many came at once to where this goes on. What has begun waits until its deadline.
                await asyncio.sleep(_FULL_PAUSE_S)
            elif isinstance(error, (EngineUnavailable, Overloaded, AdapterDoesNotFit)) or (
                begun and isinstance(error, EngineBroken)
            ):
                tried.append(lease.replica)
                failed += 1
                # Who found it full is told so at once where there is no other: that is load.
                full = isinstance(error, (Overloaded, AdapterDoesNotFit))
                wait_until = 0.0 if full else batch.deadline
                if failed == _ATTEMPTS or not await replicas.until_other(
                    tried, generation, wait_until, came
                ):
                    raise
            else:
                _tell(error, generation, begun=begun)
                raise


def _tell(error: Exception, generation: Generation, *, begun: bool) -> None:
    """Raises what the client is told, where that is something else."""
    if begun:
        if isinstance(error, InvalidRequest):
            raise AnswerLost("The answer could not go on; try again.") from error
    elif isinstance(error, EngineStepFailed) and generation.params.guide is not None:
        # No other replica is risked for it. Whether it was this request that ended the others is
        # not known; one with a guide that has not begun most likely was.
        raise EngineError(
            "The engine failed when it began with this request, most likely on what its answer "
            "must match."
        ) from error


def _using(lora: Lora | None, replica: Replica) -> AbstractContextManager[object]:
    if lora is None or lora.folders is None:
        return _NOTHING
    return lora.folders.using(replica.endpoint)


def _prefixes(batch: Batch, generation: Generation) -> PromptPrefixes:
    return hash_prefixes(generation, batch.caller.tenant if batch.caller.isolated_cache else "")
