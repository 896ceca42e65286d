"""One generation on one replica; on another one when the first fails before its first token.

After the first token there is no second attempt: another engine would go on with another text.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

from gateway.errors import EngineUnavailable, GatewayError, Overloaded
from gateway.generation import Generation, TokenDelta
from gateway.replicas.replicas import Lease, Replica, Replicas
from gateway.triton.engine import TokenStream

_ATTEMPTS = 3
# KV-cache blocks are shared from the first token on, so prompts that begin alike go to one replica.
# Fewer tokens than a block hold nothing to share; of long prompts the beginning tells enough.
_PREFIX_IDS = range(64, 257)

T = TypeVar("T")


class TokenDeltas:
    """Token deltas until the final one, to be iterated in a `with`; left early it stops the engine.

    `deadline` is in the loop's time. Iterating raises GatewayError, and TimeoutError at the
    deadline. (No generator: whether it is left because all is said or because the client went away
    could not be seen inside one, and the stop request is counted by its reason.)
    """

    def __init__(self, replicas: Replicas, generation: Generation, deadline: float) -> None:
        self._replicas = replicas
        self._generation = generation
        self._deadline = deadline
        self._tried: list[Replica] = []
        self._lease: Lease | None = None
        self._stream: TokenStream | None = None
        self._begun = False

    def __enter__(self) -> TokenDeltas:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        stream, self._stream = self._stream, None
        lease, self._lease = self._lease, None
        if stream is not None:
            stream.__exit__(error_type, error, traceback)
        if lease is not None:
            lease.__exit__(error_type, error, traceback)

    def __aiter__(self) -> TokenDeltas:
        return self

    async def __anext__(self) -> TokenDelta:
        while True:
            try:
                delta = await (self._stream or self._start()).__anext__()
            except (EngineUnavailable, Overloaded) as error:
                if self._begun or self._lease is None:
                    raise
                replica = self._lease.replica
                self.__exit__(type(error), error, error.__traceback__)
                _another(self._replicas, replica, self._tried, error)
                continue
            if not self._begun and self._lease is not None:
                self._begun = True
                self._lease.answered()
            return delta

    def _start(self) -> TokenStream:
        lease = _pick(self._replicas, self._generation, self._tried)
        self._lease = lease.__enter__()
        stream = lease.engine.generate(self._generation, _left(self._deadline), lease.metadata)
        self._stream = stream.__enter__()
        return stream


async def whole(
    replicas: Replicas,
    generation: Generation,
    deadline: float,
    ask: Callable[[Lease, float], Awaitable[T]],
) -> T:
    """What `ask` gets from one replica at once; it is told the lease and the seconds left."""
    tried: list[Replica] = []
    while True:
        lease = _pick(replicas, generation, tried)
        try:
            with lease:
                answer = await ask(lease, _left(deadline))
                lease.answered()
                return answer
        except (EngineUnavailable, Overloaded) as error:
            _another(replicas, lease.replica, tried, error)


def _pick(replicas: Replicas, generation: Generation, tried: list[Replica]) -> Lease:
    return replicas.pick(_home_of(generation) if replicas.several else None, tried)


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
    if generation.lora is not None:
        return b"lora %d" % generation.lora.task_id
    ids = generation.prompt_ids[: _PREFIX_IDS.stop - 1]
    return array("i", ids).tobytes() if len(ids) in _PREFIX_IDS else None
