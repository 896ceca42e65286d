"""One generation on one replica; on another one when the first fails before its first token.

After the first token there is no second attempt: another engine would go on with another text.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gateway.errors import EngineUnavailable, GatewayError, Overloaded
from gateway.generation import Generation
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
    generation: Generation,
    deadline: float,
    ask: Callable[[ReplicaLease, float], Awaitable[T]],
) -> T:
    """What `ask` returns, which is told a lease and the seconds left until `deadline`.

    It says ``lease.answered()`` when the first token is there. `deadline` is in the loop's time.
    """
    tried: list[Replica] = []
    while True:
        lease = _pick(replicas, request, generation, tried)
        try:
            with lease:
                return await ask(lease, _left(deadline))
        except (EngineUnavailable, Overloaded) as error:
            if lease.has_answered:
                raise
            _another(replicas, lease.replica, tried, error)


def _pick(
    replicas: Replicas, request: RequestContext, generation: Generation, tried: list[Replica]
) -> ReplicaLease:
    return replicas.pick(request, _home_of(generation) if replicas.several else None, tried)


def _another(
    replicas: Replicas, failed: Replica, tried: list[Replica], error: GatewayError
) -> None:
    """Notes that a replica has failed. Raises `error` when there is no other to ask."""
    tried.append(failed)
    if len(tried) == _ATTEMPTS or not replicas.has_other_than(tried):
        raise error


def _left(deadline: float) -> float:
    """Seconds. Raises TimeoutError when there are none."""
    left = deadline - asyncio.get_running_loop().time()
    if left <= 0:
        raise TimeoutError
    return left


def _home_of(generation: Generation) -> bytes | None:
    """What requests have in common that should meet on one replica."""
    if generation.params.lora is not None:
        return b"lora %d" % generation.params.lora.task_id
    ids = generation.prompt_ids[: _PREFIX_IDS.stop - 1]
    return array("i", ids).tobytes() if len(ids) in _PREFIX_IDS else None
