"""The room that one engine has for adapters in use, and whose request has some.

When every adapter that TensorRT-LLM's cache holds is in use, one more fails. How many fit, nobody
tells; so after an overflow requests wait for another adapter to go idle. What goes idle then is for
the tenant that has the fewest in use.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass

# A request for an adapter that is in use needs no room, so it goes ahead of requests that wait for
# some. After this time it no longer goes ahead of those of its own tenant, or of one that has fewer
# adapters in use, or they could wait for ever.
_OVERTAKE_PERIOD_S = 1.0
# After an overflow fewer adapters may be in flight at once. One very large adapter may have been
# the reason, so after this time twice as many are tried, if more are wanted. All that wait, tried
# at once, would bring their weights for nothing.
_LIMIT_PERIOD_S = 30.0


@dataclass(slots=True, eq=False)
class _Waiter:
    task_id: int
    tenant: str
    since: float
    granted: asyncio.Future[None]


class AdapterBudget:
    """Of one replica, as seen from here. Belongs to one event loop."""

    def __init__(self) -> None:
        self._active: Counter[int] = Counter()
        self._active_of: dict[str, Counter[int]] = {}
        self._waiting: deque[_Waiter] = deque()
        self._limit: int | None = None
        self._limit_until = 0.0

    @property
    def active(self) -> frozenset[int]:
        """Task ids with a request in flight."""
        return frozenset(self._active)

    @property
    def waiting(self) -> frozenset[int]:
        """Task ids whose requests wait for another adapter to go idle."""
        return frozenset(turn.task_id for turn in self._waiting)

    async def acquire(self, task_id: int, tenant: str = "") -> None:
        """A slot for a request, waiting in line if need be. Each needs one `give_back`."""
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
            else:  # handed over in the same moment
                self.release(task_id, tenant)
            raise

    def release(self, task_id: int, tenant: str = "") -> None:
        """Gives the slot back to whoever is next."""
        for active in (self._active, self._active_of[tenant]):
            active[task_id] -= 1
            if not active[task_id]:
                del active[task_id]
        if not self._active_of[tenant]:
            del self._active_of[tenant]
        self._grant_next()

    def reduce_limit(self) -> None:
        """The engine could not make room: fewer adapters at once from now on."""
        self._limit = max(1, len(self._active) - 1)
        self._limit_until = time.monotonic() + _LIMIT_PERIOD_S

    def _start(self, task_id: int, tenant: str) -> None:
        self._active[task_id] += 1
        self._active_of.setdefault(tenant, Counter())[task_id] += 1

    def _in_use_by(self, tenant: str) -> int:
        """Adapters, however many requests each of them has."""
        return len(self._active_of.get(tenant, ()))

    def _has_free_slot(self) -> bool:
        return self._limit is None or len(self._active) < self._limit

    def _raise_limit(self) -> None:
        if self._limit is not None and time.monotonic() >= self._limit_until:
            self._limit *= 2
            self._limit_until = time.monotonic() + _LIMIT_PERIOD_S

    def _grant_next(self) -> None:
        """Room goes to the tenant with the fewest adapters in use, among equals to who waits
        longest."""
        self._grant_active()
        while self._waiting:
            self._raise_limit()
            if not self._has_free_slot():
                return
            self._grant(min(self._waiting, key=lambda turn: self._in_use_by(turn.tenant)))
            self._grant_active()

    def _grant_active(self) -> None:
        """Hands over to those that need no room, but for whom nobody may pass any more."""
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
