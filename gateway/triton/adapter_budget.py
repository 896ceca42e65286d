"""Limit on the number of LoRA adapters in use on one engine, shared fairly by tenants.

TensorRT-LLM's adapter cache cannot evict an adapter that a running request uses. If the cache is
full of such adapters, a request for another adapter fails. The engine does not report how many
adapters fit into its cache. After the first such failure, the gateway therefore limits the number
of adapters in use ("slots"). A request for a further adapter then waits until an adapter is no
longer in use. The free slot goes to the tenant with the fewest adapters in use.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass

# Maximum time in seconds for which a request that waits for a slot may be overtaken. A request for
# an adapter that is already in use needs no slot, so it can start first. But it keeps its adapter
# in use, so no slot becomes free for the waiting requests. If a request has waited for longer than
# this time, it is not overtaken any more by requests of its own tenant, nor by requests of tenants
# with more adapters in use.
_OVERTAKE_PERIOD_S = 1.0
# Seconds after which the limit is doubled if requests still wait for a slot. The limit may be too
# low, because a single very large adapter may have filled the cache. The limit is not removed at
# once. Otherwise all waiting requests would upload their adapters together, and the engine would
# refuse most of these uploads.
_LIMIT_PERIOD_S = 30.0


@dataclass(slots=True, eq=False)
class _Waiter:
    task_id: int
    tenant: str
    since: float
    granted: asyncio.Future[None]


class AdapterBudget:
    """Adapters that this process uses on one replica, with a limit on their number.

    Not thread-safe: use an instance in one event loop only.
    """

    def __init__(self) -> None:
        self._active: Counter[int] = Counter()
        self._active_of: dict[str, Counter[int]] = {}
        self._waiting: deque[_Waiter] = deque()
        self._limit: int | None = None
        self._limit_until = 0.0

    @property
    def active(self) -> frozenset[int]:
        """Task ids (the engine's adapter ids) of the adapters with a request in flight."""
        return frozenset(self._active)

    @property
    def waiting(self) -> frozenset[int]:
        """Task ids of the adapters whose requests wait for a free slot."""
        return frozenset(turn.task_id for turn in self._waiting)

    async def acquire(self, task_id: int, tenant: str = "") -> None:
        """Wait until a request may use the adapter. Call `release` when the request has ended."""
        if self._limit is None:
            self._start(task_id, tenant)
            return
        handed_over = asyncio.get_running_loop().create_future()
        turn = _Waiter(task_id, tenant, time.monotonic(), handed_over)
        self._waiting.append(turn)
        self._grant_next()
        try:
            await turn.granted
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._grant_next()
            else:  # the slot was granted at the same moment, so give it back
                self.release(task_id, tenant)
            raise

    def release(self, task_id: int, tenant: str = "") -> None:
        """End a request's use of the adapter, and grant the freed slot to waiting requests."""
        for active in (self._active, self._active_of[tenant]):
            active[task_id] -= 1
            if not active[task_id]:
                del active[task_id]
        if not self._active_of[tenant]:
            del self._active_of[tenant]
        self._grant_next()

    def reduce_limit(self) -> None:
        """Limit the number of adapters in use to one less than the number in use now.

        Call this when the engine has refused an adapter because its cache is full.
        """
        self._limit = max(1, len(self._active) - 1)
        self._limit_until = time.monotonic() + _LIMIT_PERIOD_S

    def _start(self, task_id: int, tenant: str) -> None:
        self._active[task_id] += 1
        self._active_of.setdefault(tenant, Counter())[task_id] += 1

    def _in_use_by(self, tenant: str) -> int:
        """Return the number of different adapters that the tenant's requests in flight use."""
        return len(self._active_of.get(tenant, ()))

    def _has_free_slot(self) -> bool:
        return self._limit is None or len(self._active) < self._limit

    def _raise_limit(self) -> None:
        if self._limit is not None and time.monotonic() >= self._limit_until:
            self._limit *= 2
            self._limit_until = time.monotonic() + _LIMIT_PERIOD_S

    def _grant_next(self) -> None:
        """Grant free slots. Each slot goes to the tenant with the fewest adapters in use.

        If several tenants have the same number in use, the request that waits longest gets the
        slot.
        """
        self._grant_active()
        while self._waiting:
            self._raise_limit()
            if not self._has_free_slot():
                return
            self._grant(min(self._waiting, key=lambda turn: self._in_use_by(turn.tenant)))
            self._grant_active()

    def _grant_active(self) -> None:
        """Admit all waiting requests whose adapter is already in use, because they need no slot.

        A request that has waited for a slot for longer than `_OVERTAKE_PERIOD_S` seconds is not
        overtaken by requests of its own tenant, nor by requests of tenants with more adapters in
        use.
        """
        now = time.monotonic()
        passed_long: set[str] = set()
        for turn in list(self._waiting):
            if turn.task_id not in self._active:
                if not self._has_free_slot() and now - turn.since > _OVERTAKE_PERIOD_S:
                    passed_long.add(turn.tenant)
            elif turn.tenant not in passed_long and not any(
                self._in_use_by(turn.tenant) > self._in_use_by(other) for other in passed_long
            ):
                self._grant(turn)

    def _grant(self, turn: _Waiter) -> None:
        self._waiting.remove(turn)
        self._start(turn.task_id, turn.tenant)
        if not turn.granted.done():
            turn.granted.set_result(None)
