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
_PASS_FOR_S = 1.0
# After an overflow fewer adapters may be in flight at once. One very large adapter may have been
# the reason, so after this time twice as many are tried, if more are wanted. All that wait, tried
# at once, would bring their weights for nothing.
_LIMIT_FOR_S = 30.0
# What found no room although nothing else was in use is not sent again for so long. By then the
# cache may be another, or less of it in use by other gateways.
_REFUSED_FOR_S = 300.0


@dataclass(slots=True, eq=False)
class _Turn:
    task_id: int
    tenant: str
    since: float
    handed_over: asyncio.Future[None]


class AdapterRoom:
    """Of one replica, as seen from here. Belongs to one event loop."""

    def __init__(self) -> None:
        self._active: Counter[int] = Counter()
        self._active_of: dict[str, Counter[int]] = {}
        self._waiting: deque[_Turn] = deque()
        self._limit: int | None = None
        self._limit_until = 0.0
        self._lowered: dict[int, int | None] = {}
        """By the task ids that the limit was lowered for: what it was before."""
        self._largest = 0
        """Bytes of the largest adapter that the engine has taken."""
        self._refused: dict[int, float] = {}
        """Until when a task id is refused."""

    @property
    def active(self) -> frozenset[int]:
        """Task ids with a request in flight."""
        return frozenset(self._active)

    @property
    def waiting(self) -> frozenset[int]:
        """Task ids whose requests wait for another adapter to go idle."""
        return frozenset(turn.task_id for turn in self._waiting)

    async def take(self, task_id: int, tenant: str = "") -> None:
        """A slot for a request, waiting in line if need be. Each needs one `give_back`."""
        if self._limit is None:
            self._start(task_id, tenant)
            return
        handed_over = asyncio.get_running_loop().create_future()
        turn = _Turn(task_id, tenant, time.monotonic(), handed_over)
        self._waiting.append(turn)
        self._hand_over()
        try:
            await turn.handed_over
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
                self._hand_over()
            else:  # handed over in the same moment
                self.give_back(task_id, tenant)
            raise

    def give_back(self, task_id: int, tenant: str = "") -> None:
        """Gives the slot back to whoever is next."""
        for active in (self._active, self._active_of[tenant]):
            active[task_id] -= 1
            if not active[task_id]:
                del active[task_id]
        if not self._active_of[tenant]:
            del self._active_of[tenant]
        self._hand_over()

    def overflow(self, task_id: int, nbytes: int, before: int = 0) -> None:
        """The engine could not make room for an adapter of so many bytes, as `before` for the same
        request: fewer adapters at once from now on, where there are others."""
        if len(self._active) == 1:
            return
        self._lowered.setdefault(task_id, self._limit)
        # What may need the whole cache gets there in ever larger steps, not in a hundred.
        fewer = 2**before if nbytes > self._largest else 1
        self._limit = max(1, len(self._active) - fewer)
        self._limit_until = time.monotonic() + _LIMIT_FOR_S

    def may_be_too_large(self, nbytes: int) -> bool:
        """Whether an adapter that has a slot and found no room may need more than the whole cache:
        no other one is in use, as far as is known here, and none so large was ever taken."""
        return len(self._active) == 1 and nbytes > self._largest

    def refuse(self, task_id: int) -> None:
        """It is larger than the whole cache: not to be sent for some minutes. What others have lost
        for its sake they have again."""
        self._refused[task_id] = time.monotonic() + _REFUSED_FOR_S
        if task_id in self._lowered:
            before = self._lowered.pop(task_id)
            if self._limit is not None:
                self._limit = None if before is None else max(before, self._limit)
            self._hand_over()

    def refuses(self, task_id: int, nbytes: int) -> bool:
        """Whether it is not to be sent. Where one as large was taken since, there was no room for
        another reason."""
        until = self._refused.get(task_id, 0.0)
        return time.monotonic() < until and nbytes > self._largest

    def loaded(self, task_id: int, nbytes: int) -> None:
        """The engine has taken it."""
        self._largest = max(self._largest, nbytes)
        self._lowered.pop(task_id, None)

    def restarted(self) -> None:
        """The engine process is a new one: its cache may be of another size."""
        self._largest = 0
        self._lowered.clear()
        self._refused.clear()

    def _start(self, task_id: int, tenant: str) -> None:
        self._active[task_id] += 1
        self._active_of.setdefault(tenant, Counter())[task_id] += 1

    def _in_use_by(self, tenant: str) -> int:
        """Adapters, however many requests each of them has."""
        return len(self._active_of.get(tenant, ()))

    def _has_room(self) -> bool:
        return self._limit is None or len(self._active) < self._limit

    def _relax(self) -> None:
        if self._limit is not None and time.monotonic() >= self._limit_until:
            self._limit *= 2
            self._limit_until = time.monotonic() + _LIMIT_FOR_S

    def _hand_over(self) -> None:
        """Room goes to the tenant with the fewest adapters in use, among equals to who waits
        longest."""
        self._let_pass()
        while self._waiting:
            self._relax()
            if not self._has_room():
                return
            self._give(min(self._waiting, key=lambda turn: self._in_use_by(turn.tenant)))
            self._let_pass()

    def _let_pass(self) -> None:
        """Hands over to those that need no room, but for whom nobody may pass any more."""
        now = time.monotonic()
        passed_long: set[str] = set()
        for turn in list(self._waiting):
            if turn.task_id not in self._active:
                if not self._has_room() and now - turn.since > _PASS_FOR_S:
                    passed_long.add(turn.tenant)
            elif turn.tenant not in passed_long and not any(
                self._in_use_by(turn.tenant) > self._in_use_by(other) for other in passed_long
            ):
                self._give(turn)

    def _give(self, turn: _Turn) -> None:
        self._waiting.remove(turn)
        self._start(turn.task_id, turn.tenant)
        if not turn.handed_over.done():
            turn.handed_over.set_result(None)
