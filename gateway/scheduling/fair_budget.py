"""Fair sharing of a limited resource between tenants.

The resource is a number of engine slots, bytes of memory, or concurrent calls of a model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple

from gateway.errors import Overloaded
from gateway.scheduling.eviction import Eviction
from gateway.scheduling.fair_pool import FairPool
from gateway.scheduling.kinds import Lane
from gateway.scheduling.queues import QueueEntry, Scopes, TenantQueue


class Ask(NamedTuple):
    """Arguments of the method `permit`, stored in the returned `Permit`.

    `EngineQueue.permit` describes them.
    """

    tenant: str
    priority: int
    cost: int
    wait_s: float | None
    first_token_s: float | None = None
    max_expected_s: float | None = None
    is_resumed: bool = False
    lane: Lane = None


class FairBudget:
    """Limited resource that tenants share fairly. Requests wait in a bounded queue for free units.

    A unit is an engine slot, a byte of memory or a concurrent call. `FairPool` describes which
    tenant gets the next free units. Not thread-safe: use an instance in one event loop only.
    """

    def __init__(
        self,
        limit: Callable[[], int],
        share: Callable[[], float] = lambda: 1.0,
        *,
        scopes: Scopes | None = None,
        queue: int,
        queue_of_tenant: int | None = None,
        wait_s: float,
    ) -> None:
        """Start with all units free and an empty queue.

        Args:
            limit: returns the current number of units.
            share: returns the fraction of the units that one tenant may hold.
            scopes: returns the `queues.Scope` objects in which a permit of a `kinds.Lane` needs
                free units; called only if a lane other than None is in use.
            queue: maximum number of waiting permits of all tenants together.
            queue_of_tenant: maximum number of waiting permits of one tenant. The default is
                `queue`.
            wait_s: maximum time in the queue, in seconds.
        """
        self._wait_s = wait_s
        self._pool = FairPool(limit, share, scopes)
        self._eviction = Eviction(
            self._pool, queue, queue if queue_of_tenant is None else queue_of_tenant
        )

    @property
    def in_flight(self) -> int:
        """Number of units in use."""
        return self._pool.in_use.total

    @property
    def waiting(self) -> int:
        """Number of permits that wait."""
        return self._pool.queued.total

    @property
    def waiting_by_tenant(self) -> dict[str, int]:
        """Number of waiting permits by tenant. Tenants without a waiting permit are left out."""
        return {name: n for name, queue in self._pool.queues.items() if (n := queue.waiting)}

    @property
    def slots(self) -> int:
        """Present total number of units, in use or free."""
        return self._pool.limit

    def permit(
        self,
        tenant: str,
        priority: int = 0,
        *,
        cost: int = 1,
        wait_s: float | None = None,
        is_resumed: bool = False,
    ) -> Permit:
        """Return a permit to use `cost` units. Enter the permit with `async with`.

        If enough units are free, the permit is granted at once. Otherwise, the permit waits in the
        tenant's queue until units become free. With `is_resumed`, the permit waits at the front of
        the queue for up to `wait_s` seconds, even if the queue is full. This cannot make the queue
        much longer, because a request that has started waits for one permit at a time.

        Args:
            tenant: the tenant's name.
            priority: the tenant's priority; a greater number is served first.
            cost: number of units.
            wait_s: maximum time in the queue in seconds, if less than the queue's own limit.
            is_resumed: True for a further permit of a request that has started.

        Entering the permit raises:

        - Overloaded if the queue is full, or if too few units became free in time;
        - TimeoutError if `wait_s` has passed and is less than the queue's own limit.
        """
        limit_s = wait_s if is_resumed else min_optional(self._wait_s, wait_s)
        return Permit(self, Ask(tenant, priority, cost, limit_s, is_resumed=is_resumed))

    def max_cost(self) -> int | None:
        """Return the maximum number of units for one permit; None while the budget has no units."""
        limit = self._pool.limit
        return self._pool.share_of(limit) if limit else None

    def grant_free_slots(self) -> None:
        """Grant free units to waiting permits. Call this when `limit` may have grown."""
        self._pool.grant()

    async def enter(self, ask: Ask) -> None:
        """Take the units of a permit, waiting in the queue if too few are free. See `permit`."""
        tenant, cost, lane, wait_s = ask.tenant, ask.cost, ask.lane, ask.wait_s
        pool = self._pool
        queue = pool.queue_of(tenant)
        queue.priority = ask.priority
        if pool.take_free(queue, cost, lane):
            return
        turn_s = wait_s
        entry = QueueEntry(cost, asyncio.get_running_loop().create_future(), ask.is_resumed)
        if not ask.is_resumed:
            try:
                turn_s = self._limit_turn(queue, ask)
                self._eviction.make_space(queue)
            except Overloaded:
                pool.remove_if_idle(tenant)
                raise
        pool.append(queue, lane, entry)
        pool.grant()
        try:
            async with asyncio.timeout(turn_s):
                await entry.admitted
        except BaseException as error:
            if not pool.discard(queue, lane, entry) and entry.is_admitted:
                # the entry was granted its units just before the wait was cancelled or timed out
                self.release(ask)
            pool.remove_if_idle(tenant)
            pool.grant()  # grant the free units that were reserved for this entry
            late = turn_s is not None and turn_s != wait_s
            if isinstance(error, TimeoutError) and (late or wait_s == self._wait_s):
                expected_s = self._expect_wait(queue, cost, lane) if late else None
                raise Overloaded(
                    f"No slot became free within {turn_s:.3g} seconds; try again later.",
                    max(turn_s or 0.0, expected_s or 0.0),
                    "too_late" if late else "queue_timeout",
                ) from None
            raise

    def release(self, ask: Ask) -> None:
        """Give the units of a permit back, and grant them to waiting permits."""
        self._pool.release(ask.tenant, ask.cost, ask.lane)

    def _limit_turn(self, queue: TenantQueue, ask: Ask) -> float | None:
        """Return the permit's maximum time in the queue, in seconds; None for no limit.

        A subclass may override this method, and raise Overloaded if the expected wait is too long.
        """
        return ask.wait_s

    def _expect_wait(self, queue: TenantQueue, cost: int, lane: Lane) -> float | None:
        """Return the expected time in the queue in seconds; None if there is no forecast."""
        return None


class Permit:
    """Context manager that holds units of a `FairBudget`. Created by `FairBudget.permit`."""

    __slots__ = ("_ask", "_budget")

    def __init__(self, budget: FairBudget, ask: Ask) -> None:
        self._budget = budget
        self._ask = ask

    async def __aenter__(self) -> Permit:
        await self._budget.enter(self._ask)
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the units back."""
        self._budget.release(self._ask)


def min_optional(one: float, other: float | None) -> float:
    """Return the smaller of two numbers, or `one` if `other` is None."""
    return one if other is None else min(one, other)
