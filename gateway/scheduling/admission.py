"""Who may start now: a bounded number in flight, a bounded queue, a fair turn for each tenant.

The engine batches whatever it is given, and its own queue is first come, first served: a burst of
one tenant would be ahead of everybody. So the gateway lets in only as many as the engines run at
once and keeps the rest, by tenant, here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from gateway.errors import Overloaded


@dataclass(eq=False, slots=True)
class _Waiting:
    cost: int
    admitted: asyncio.Future[None]
    since: float = field(default_factory=time.monotonic)

    @property
    def is_admitted(self) -> bool:
        done = self.admitted.done() and not self.admitted.cancelled()
        return done and self.admitted.exception() is None


@dataclass(slots=True)
class _TenantQueue:
    """One tenant: its requests in flight, and those that wait, in order."""

    priority: int = 0
    in_flight: int = 0
    waiting: deque[_Waiting] = field(default_factory=deque)


class Admission:
    """Permits for generations. Belongs to one event loop; taking and giving back never waits for
    I/O.

    Each choice of a request asks for a place of its own, so that a request larger than what is free
    runs in turns, and nobody waits until enough is free for all of it. Only the beams of a search
    take their places together; they are never more than its tenant's share.

    Free places go to the tenant of the highest priority, among equals to the one that would then
    have the fewest, and of its generations to the first in line. One tenant alone gets at most
    `share` of the places, so that the next one to come finds one free.
    """

    def __init__(
        self,
        limit: Callable[[], int],
        share: Callable[[], float] = lambda: 1.0,
        *,
        capacity: Callable[[], int] | None = None,
        queue: int,
        queue_of_tenant: int | None = None,
        wait_s: float,
    ) -> None:
        """`limit` is asked for the number of places now, `capacity` for that with all engines at
        work (as `limit` unless given), `queue` bounds who waits, all tenants together,
        `queue_of_tenant` those of one, and nobody waits longer than `wait_s` seconds."""
        self._limit = limit
        self._capacity = capacity or limit
        self._queue = queue
        self._queue_of_tenant = queue if queue_of_tenant is None else queue_of_tenant
        self._wait_s = wait_s
        self._share = share
        self._queues: dict[str, _TenantQueue] = {}
        self.in_flight = 0
        self.waiting = 0

    def permit(
        self,
        tenant: str,
        priority: int = 0,
        *,
        cost: int = 1,
        wait_s: float | None = None,
        goes_on: bool = False,
    ) -> Permit:
        """`cost` places for a generation of `tenant`, to be taken with `async with`.

        Entering raises Overloaded at once when the queue is full, and later when no place came
        free in time; TimeoutError after `wait_s` seconds, if that is less than everybody's limit.

        The next one of a request that has begun (`goes_on`) is first in its tenant's line, and
        waits there for as long as `wait_s` allows, whoever else waits. A line has one of these at
        most, so they need no bound.
        """
        limit = wait_s if goes_on else _least(self._wait_s, wait_s)
        return Permit(self, tenant, priority, cost, limit, goes_on=goes_on)

    @property
    def largest(self) -> int | None:
        """The greatest cost that can ever have its turn; None while no engine is there."""
        capacity = self._capacity()
        return self._most(capacity) if capacity else None

    async def enter(
        self, tenant: str, priority: int, cost: int, wait_s: float | None, *, goes_on: bool
    ) -> None:
        queue = self._queues.setdefault(tenant, _TenantQueue())
        queue.priority = priority
        limit = self._limit()
        if (
            not queue.waiting
            and not self._somebody_is_first(limit)
            and self._may_have(queue, cost, limit)
            and self.in_flight + cost <= limit
        ):
            self._admit(queue, cost)
            return
        waiting = _Waiting(cost, asyncio.get_running_loop().create_future())
        if goes_on:
            queue.waiting.appendleft(waiting)
        else:
            try:
                self._shed(queue)
            except Overloaded:
                self._tidy(tenant, queue)
                raise
            queue.waiting.append(waiting)
        self.waiting += 1
        self.fill()
        try:
            async with asyncio.timeout(wait_s):
                await waiting.admitted
        except BaseException as error:
            if waiting in queue.waiting:
                queue.waiting.remove(waiting)
                self.waiting -= 1
            elif waiting.is_admitted:
                self.leave(tenant, cost)  # in the moment in which it gave up
            self._tidy(tenant, queue)
            self.fill()  # it may have been the one that places were kept for
            if isinstance(error, TimeoutError) and wait_s == self._wait_s:
                raise Overloaded(
                    f"No place came free within {wait_s:g} seconds; try again later.", wait_s
                ) from None
            raise

    def leave(self, tenant: str, cost: int) -> None:
        queue = self._queues[tenant]
        queue.in_flight -= cost
        self.in_flight -= cost
        self._tidy(tenant, queue)
        self.fill()

    def fill(self) -> None:
        """Hands out the places that are free; to be called when the limit may have grown."""
        while self.waiting:
            limit = self._limit()
            able = [queue for queue in self._queues.values() if self._is_waiting(queue, limit)]
            if not able:
                return
            queue = min(able, key=_turn)
            if self.in_flight + queue.waiting[0].cost > limit:
                return  # what is free is kept until it is enough
            waiting = queue.waiting.popleft()
            self.waiting -= 1
            if not waiting.admitted.cancelled():
                self._admit(queue, waiting.cost)
                waiting.admitted.set_result(None)

    def _admit(self, queue: _TenantQueue, cost: int) -> None:
        queue.in_flight += cost
        self.in_flight += cost

    def _may_have(self, queue: _TenantQueue, cost: int, limit: int) -> bool:
        """Whether the tenant's share allows so many more."""
        return queue.in_flight + cost <= self._most(limit)

    def _most(self, limit: int) -> int:
        """A tenant's share."""
        return max(1, int(limit * self._share()))

    def _is_waiting(self, queue: _TenantQueue, limit: int) -> bool:
        return bool(queue.waiting) and self._may_have(queue, queue.waiting[0].cost, limit)

    def _somebody_is_first(self, limit: int) -> bool:
        return bool(self.waiting) and any(
            self._is_waiting(queue, limit) for queue in self._queues.values()
        )

    def _shed(self, queue: _TenantQueue) -> None:
        """Raises Overloaded when waiting is no use.

        In a full queue, the tenant with most requests in it gives up its last one for another's.
        """
        if len(queue.waiting) >= self._queue_of_tenant:
            raise self._queue_full(queue)
        if self.waiting < self._queue:
            return
        longest = max(self._queues.values(), key=lambda other: len(other.waiting))
        if len(longest.waiting) <= len(queue.waiting) + 1:
            raise self._queue_full(queue)
        last = longest.waiting.pop()
        self.waiting -= 1
        if not last.admitted.done():
            last.admitted.set_exception(self._queue_full(longest))

    def _queue_full(self, own: _TenantQueue) -> Overloaded:
        """With the time that the first in line has waited: whoever comes now would as well.

        Tenants take turns, so another's line is asked only by who has none.
        """
        lines = [own] if own.waiting else self._queues.values()
        since = [queue.waiting[0].since for queue in lines if queue.waiting]
        waited_s = time.monotonic() - min(since) if since else 0.0
        return Overloaded("Too many requests are waiting; try again later.", waited_s)

    def _tidy(self, tenant: str, queue: _TenantQueue) -> None:
        if not queue.in_flight and not queue.waiting and self._queues.get(tenant) is queue:
            del self._queues[tenant]


class Permit:
    """See `Admission.permit`."""

    def __init__(
        self,
        admission: Admission,
        tenant: str,
        priority: int,
        cost: int,
        wait_s: float | None,
        *,
        goes_on: bool,
    ) -> None:
        self._admission = admission
        self._tenant = tenant
        self._priority = priority
        self._cost = cost
        self._wait_s = wait_s
        self._goes_on = goes_on

    async def __aenter__(self) -> Permit:
        await self._admission.enter(
            self._tenant, self._priority, self._cost, self._wait_s, goes_on=self._goes_on
        )
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Gives the places back."""
        self._admission.leave(self._tenant, self._cost)


def _turn(queue: _TenantQueue) -> tuple[int, int, float]:
    """Of those that wait, the least is next.

    A tenant with few places does not wait for another's many beams; one with more than those does.
    """
    first = queue.waiting[0]
    return -queue.priority, queue.in_flight + first.cost, first.since


def _least(one: float, other: float | None) -> float:
    return one if other is None else min(one, other)
