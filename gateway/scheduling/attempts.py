"""One generation on one replica; on another one when the first fails before its first token.

After the first token there is no second attempt: another engine would go on with another text.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from gateway.errors import (
    EngineError,
    EngineStepFailed,
    EngineUnavailable,
    Overloaded,
)
from gateway.generation import Batch, Lora
from gateway.observability.request_context import RequestContext
from gateway.scheduling.replica import Replica, ReplicaLease
from gateway.scheduling.replicas import Replicas

_ATTEMPTS = 3
# KV-cache blocks are shared from the first token on, so prompts that begin alike go to one replica.
# Fewer tokens than a block hold nothing to share; of long prompts the beginning tells enough.
_PREFIX_IDS = range(64, 257)

T = TypeVar("T")


async def attempt(
    replicas: Replicas,
    request: RequestContext,
    batch: Batch,
    index: int,
    ask: Callable[[ReplicaLease], Awaitable[T]],
) -> T:
    """What `ask` returns. Raises TimeoutError from the batch's deadline on.

    `index` is the generation's place in the batch. `ask` says ``lease.answered()`` when the first
    token is there.
    """
    tried: list[Replica] = []
    generation = batch.generations[index]
    lora = generation.params.lora
    home = _home_of(batch, index) if replicas.several else None
    while True:
        lease = replicas.pick(request, generation, home, tried, batch.came)
        try:
            with lease, _using(lora, lease.replica):
                if asyncio.get_running_loop().time() >= batch.deadline:
                    raise TimeoutError
                return await ask(lease)
        except (EngineUnavailable, Overloaded):
            if lease.has_answered:
                raise
            tried.append(lease.replica)
            if len(tried) == _ATTEMPTS or not replicas.has_other_than(
                tried, generation, batch.came
            ):
                raise
        except EngineStepFailed as error:
            # No other replica is risked for it. Whether it was this request that ended the others
            # is not known; one with a guide that has not begun most likely was.
            if lease.has_answered or generation.params.guide is None:
                raise
            raise EngineError(
                "The engine failed when it began with this request, most likely on what its answer "
                "must match."
            ) from error


def _using(lora: Lora | None, replica: Replica) -> AbstractContextManager[object]:
    if lora is None or lora.folders is None:
        return nullcontext()
    return lora.folders.using(replica.endpoint)


def _home_of(batch: Batch, index: int) -> bytes | None:
    """What requests have in common that should meet on one replica."""
    generation = batch.generations[index]
    if generation.params.lora is not None:
        return b"lora %d" % generation.params.lora.task_id
    ids = generation.prompt_ids[: _PREFIX_IDS.stop - 1]
    if len(ids) not in _PREFIX_IDS:
        return None
    whose = batch.caller.tenant.encode() if batch.caller.apart else b""
    return whose + array("i", ids).tobytes()
