"""Failover: run a generation on a replica and, if that replica fails, on another replica.

If a replica fails before the first token, the next replica runs the generation from its start. If a
replica fails after the first token, the next replica generates only the missing tokens. The request
fails if no replica can continue its answer in this way.
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
    """Run one generation with `ask`, and try other replicas if a replica fails.

    Return the result of `ask`. After three failed attempts without a token, raise the last error
    instead of trying further replicas: the request itself may be the cause of the failures.

    Args:
        replicas: the replicas to pick from.
        request: the request's context; this function sets `request.replica` to the endpoint in use.
        batch: the batch that the generation belongs to.
        index: position of the generation in the batch.
        ask: runs the generation on the leased replica; calls ``lease.record_first_token()`` when
            the first token arrives.
        resume: called when a replica fails or is drained after the first token; returns a
            generation for the missing tokens, or None to give up.

    Raises:
        TimeoutError: the batch's deadline has passed.
        GatewayError: the last error of a replica, if no other replica is tried.
    """
    tried: list[Replica] = []
    failed = 0
    # True while an answer migrates from a working replica to another replica: from the decision to
    # migrate until the other replica sends its first token.
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
                # Exclude drained replicas: they accept only requests that arrived before their
                # drain, so an arrival time of infinity (`came`) excludes them.
                generation, tried, came = rest, [lease.replica], math.inf
                moves = isinstance(error, ReplicaLeft)
            elif moves:
                # The replica that should have taken over the answer failed. Try all other replicas,
                # drained replicas included: failing the answer would be worse.
                moves, tried, came = False, [lease.replica], batch.arrived_at
            elif begun and isinstance(error, Overloaded):
                # Try again after a pause. The replica is probably full only briefly, because many
                # answers migrated to it at the same time. An answer that has started may wait until
                # its deadline.
                await asyncio.sleep(_OVERLOAD_RETRY_S)
            elif isinstance(error, (EngineUnavailable, Overloaded, AdapterDoesNotFit)) or (
                begun and isinstance(error, EngineBroken)
            ):
                tried.append(lease.replica)
                failed += 1
                # If this replica has failed, wait until another replica is available. If it is only
                # full, do not wait: raise the error unless another replica is available now.
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
    """Raise a clearer error if `error` would mislead the client; otherwise return.

    An InvalidRequest after the first token is replaced by AnswerLost: the client already has tokens
    of this request, so the request itself is valid. An EngineStepFailed before the first token of a
    request with guided decoding is replaced by an EngineError that names the likely cause.
    """
    if begun:
        if isinstance(error, InvalidRequest):
            raise AnswerLost("The answer could not be resumed; try again.") from error
    elif isinstance(error, EngineStepFailed) and generation.params.guide is not None:
        # Do not retry on another replica, because this request could make that replica fail, too.
        # An engine step that fails while requests start is most likely caused by guided decoding.
        raise EngineError(
            "The engine failed when it began with this request, most likely on what its answer "
            "must match."
        ) from error


def _mark_folder_in_use(lora: Lora | None, replica: Replica) -> AbstractContextManager[object]:
    """Return a context manager that marks the LoRA adapter's folder on the replica as in use.

    While marked, the folder is not removed from the replica's disk.
    """
    if lora is None or lora.folders is None:
        return _NO_FOLDER
    return lora.folders.using(replica.endpoint)


def _hash_prefixes(batch: Batch, generation: Generation) -> PromptPrefixes:
    """Return hashes of the prompt's prefixes. They serve to find replicas with a cached prefix.

    For a tenant with an isolated cache, the result contains the tenant's name. The prefixes are
    then compared only with earlier prompts of this tenant.
    """
    return hash_prefixes(generation, batch.caller.tenant if batch.caller.isolated_cache else "")
