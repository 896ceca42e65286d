"""Admission control: a bounded number in flight, a bounded queue and fair shares for tenants.

Engines serve their own queue first come, first served, so one tenant's burst would delay all
others. The gateway therefore sends only as many requests as the engines run at once and queues the
others here, per tenant.

See decisions 024 and 075 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from types import TracebackType

from gateway.errors import Overloaded
from gateway.scheduling.forecast import Pace, Standing, expected_wait_s
from gateway.scheduling.kinds import Lane
from gateway.scheduling.queues import QueueEntry, Scope, Scopes, SlotCount, TenantQueue


class Admission:
    """Slots for generations. Belongs to one event loop; granting and releasing never wait for I/O.

    Each choice of a request needs a slot of its own, so a large request starts in parts instead of
    waiting until enough slots are free for all its choices. Only the beams of a search get their
    slots together; they never exceed the tenant's share.

    Free slots go to the tenant with the highest priority. Among equals they go to the one that
    would then hold the fewest, and within a tenant to its first queued generation. One tenant alone
    gets at most `share` of the slots, so that the next tenant finds a free one.

    Generations that only some replicas can run have a lane. They wait for slots of that lane, in a
    queue of their own, so they never delay generations that other replicas can run.
    """

    def __init__(
        self,
        limit: Callable[[], int],
        share: Callable[[], float] = lambda: 1.0,
        *,
        capacity: Callable[[Lane], int] | None = None,
        scopes: Scopes | None = None,
        queue: int,
        queue_of_tenant: int | None = None,
        wait_s: float,
    ) -> None:
        """Start with all slots free and an empty queue.

        Args:
            limit: returns the current number of slots.
            share: returns the fraction of the slots that one tenant may hold.
            capacity: returns the slots of a lane with all its replicas working; `limit` unless
                given.
            scopes: returns the scopes of a lane; called only if lanes are in use.
            queue: maximum number of waiting generations, for all tenants together.
            queue_of_tenant: the same for one tenant; `queue` unless given.
            wait_s: maximum time in the queue, in seconds.
        """
        self._limit = limit
        self._capacity = capacity or (lambda _: limit())
        self._scopes_of = scopes
        self._queue = queue
        self._queue_of_tenant = queue if queue_of_tenant is None else queue_of_tenant
        self._wait_s = wait_s
        self._share = share
        self._queues: dict[str, TenantQueue] = {}
        self._paces: dict[str, Pace] = {}
        self._in_use = SlotCount()
        self._queued = SlotCount()

    @property
    def in_flight(self) -> int:
        """Number of slots in use."""
        return self._in_use.total

    @property
    def waiting(self) -> int:
        """Number of queued generations."""
        return self._queued.total

    @property
    def waiting_by_tenant(self) -> dict[str, int]:
        """Number of queued generations by tenant, for tenants with any."""
        return {name: n for name, queue in self._queues.items() if (n := queue.waiting)}

    @property
    def slots(self) -> int:
        """Current number of slots."""
        return self._limit()

    @property
    def queued_lanes(self) -> Collection[Lane]:
        """Lanes with queued generations, without the lane None."""
        return self._queued.lanes.keys()

    def permit(
        self,
        tenant: str,
        priority: int = 0,
        *,
        cost: int = 1,
        wait_s: float | None = None,
        first_token_s: float | None = None,
        max_expected_s: float | None = None,
        is_resumed: bool = False,
        lane: Lane = None,
    ) -> Permit:
        """Return a permit for `cost` slots for a generation of `tenant`. Use it with `async with`.

        The next generation of a resumed answer (`is_resumed`) goes to the front of its tenant's
        queue and may wait up to `wait_s`, whatever the queue's limits. Each such answer has at most
        one queued generation, so their number needs no limit. A generation that need not wait is
        never refused.

        Args:
            tenant: its name.
            priority: the tenant's priority; greater goes first.
            cost: number of slots.
            wait_s: maximum time in the queue in seconds, if less than the common limit.
            first_token_s: seconds within which the first token must be expected.
            max_expected_s: seconds within which the slots must be expected on entering.
            is_resumed: the generation continues an answer that has started.
            lane: the model variants that can run it.

        Raises:
            Overloaded: on entering, if the queue is full, or if the slots are not expected in time;
                later, if no slot became free in time.
            TimeoutError: `wait_s` has passed and is less than the common limit.
        """
        limit = wait_s if is_resumed else _min_optional(self._wait_s, wait_s)
        first_token_s = None if is_resumed else first_token_s
        return Permit(
            self,
            tenant,
            priority,
            cost,
            wait_s=limit,
            first_token_s=first_token_s,
            max_expected_s=max_expected_s,
            is_resumed=is_resumed,
            lane=lane,
        )

    def record_first_token(self, tenant: str, seconds: float) -> None:
        """Record that a first token came `seconds` after its slot was granted."""
        self._pace_of(tenant).record_first_token(seconds)

    def max_cost(self, lane: Lane = None) -> int | None:
        """Return the greatest cost that can ever be granted, None while no engine is available."""
        capacity = self._capacity(lane)
        return self._share_of(capacity) if capacity else None

    async def enter(
        self,
        tenant: str,
        priority: int,
        cost: int,
        wait_s: float | None,
        first_token_s: float | None,
        *,
        max_expected_s: float | None,
        is_resumed: bool,
        lane: Lane,
    ) -> None:
        """Take `cost` slots, waiting for them in the queue if necessary. See `permit` for the
        arguments.
        """
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = TenantQueue(self._pace_of(tenant))
        queue.priority = priority
        entries = queue.by_lane.get(lane)
        if not entries and self._can_grant(queue, cost, lane):
            self._add_in_use(queue, cost, lane)
            return
        turn_s = wait_s
        waiting = QueueEntry(cost, asyncio.get_running_loop().create_future(), is_resumed)
        if is_resumed:
            entries = queue.by_lane.setdefault(lane, deque())
            entries.appendleft(waiting)
        else:
            try:
                if first_token_s is not None:
                    turn_s = _min_optional(
                        max(0.0, first_token_s - queue.pace.first_token_s), wait_s
                    )
                    self._check_expected_wait(
                        queue, cost, lane, _min_optional(turn_s, max_expected_s)
                    )
                self._shed(queue)
            except Overloaded:
                self._remove_if_idle(tenant, queue)
                raise
            entries = queue.by_lane.setdefault(lane, deque())
            entries.append(waiting)
        self._queued.add(lane, 1)
        self.grant_free_slots()
        try:
            async with asyncio.timeout(turn_s):
                await waiting.admitted
        except BaseException as error:
            if waiting in entries:
                entries.remove(waiting)
                self._queued.add(lane, -1)
            elif waiting.is_admitted:
                # it was admitted in the moment in which it gave up
                self.release(tenant, cost, lane)
            self._remove_if_idle(tenant, queue)
            self.grant_free_slots()  # free slots may have been reserved for this entry
            late = turn_s is not None and turn_s != wait_s
            if isinstance(error, TimeoutError) and (late or wait_s == self._wait_s):
                raise Overloaded(
                    f"No place came free within {turn_s:.3g} seconds; try again later.",
                    max(turn_s or 0.0, (late and self._expected_wait_s(queue, cost, lane)) or 0.0),
                    "too_late" if late else "queue_timeout",
                ) from None
            raise

    def release(self, tenant: str, cost: int, lane: Lane = None) -> None:
        """Give back `cost` slots of a tenant, and grant them to queued generations."""
        queue = self._queues[tenant]
        self._add_in_use(queue, -cost, lane)
        self._remove_if_idle(tenant, queue)
        self.grant_free_slots()

    def grant_free_slots(self) -> set[object]:
        """Grant free slots to queued generations. Call it when the limit may have grown.

        Return the keys of the scopes whose first entry needs more slots than are free.
        """
        reserved: set[object] = set()
        found: dict[Lane, Sequence[Scope]] = {}
        while self.waiting:
            for lane in {
                lane
                for queue in self._queues.values()
                for lane, entries in queue.by_lane.items()
                if entries
            }:
                if lane not in found:
                    found[lane] = self._scopes(lane)
            able = [
                (queue, lane)
                for queue in self._queues.values()
                for lane, entries in queue.by_lane.items()
                if entries
                and all(scope.key not in reserved for scope in found[lane])
                and all(
                    self._is_within_share(queue, entries[0].cost, scope) for scope in found[lane]
                )
            ]
            if not able:
                break
            queue, lane = min(able, key=_grant_order)
            cost = queue.by_lane[lane][0].cost
            lacking = {scope.key for scope in found[lane] if self._lacks_free(scope, cost)}
            if lacking:
                reserved |= lacking  # reserve the free slots until they suffice
                continue
            waiting = queue.by_lane[lane].popleft()
            self._queued.add(lane, -1)
            if not waiting.admitted.cancelled():
                self._add_in_use(queue, waiting.cost, lane)
                waiting.admitted.set_result(None)
        return reserved

    def _can_grant(self, queue: TenantQueue, cost: int, lane: Lane) -> bool:
        """Return True if `cost` slots can be granted now without overtaking a queued request."""
        reserved = self.grant_free_slots() if self.waiting else ()
        for scope in self._scopes(lane):
            if scope.key in reserved or self._lacks_free(scope, cost):
                return False
            if not self._is_within_share(queue, cost, scope):
                return False
        return True

    def _scopes(self, lane: Lane) -> Sequence[Scope]:
        """Return the scopes in which a generation of `lane` needs slots."""
        lanes, awaited = self._in_use.lanes, self._queued.lanes
        if self._scopes_of is None or (lane is None and not lanes and not awaited):
            return (Scope(self._limit()),)
        return self._scopes_of(lane, lanes.keys() | awaited.keys())

    def _lacks_free(self, scope: Scope, cost: int) -> bool:
        """Return True if fewer than `cost` slots of the scope are free."""
        return self._in_use.in_lanes(scope.lanes) + cost > scope.slots

    def _add_in_use(self, queue: TenantQueue, cost: int, lane: Lane) -> None:
        """Count `cost` more slots as in use by a tenant; a negative cost releases them."""
        queue.pace.change_slots(cost, time.monotonic())
        queue.in_use.add(lane, cost)
        self._in_use.add(lane, cost)

    def _is_within_share(self, queue: TenantQueue, cost: int, scope: Scope) -> bool:
        """Return True if the tenant's share of the scope allows `cost` more slots."""
        share = self._share_of(max(scope.slots, scope.shared))
        return queue.in_use.in_lanes(scope.lanes) + cost <= share

    def _share_of(self, limit: int) -> int:
        """Return how many of `limit` slots one tenant may hold, at least 1."""
        return max(1, int(limit * self._share()))

    def _check_expected_wait(
        self, queue: TenantQueue, cost: int, lane: Lane, turn_s: float | None
    ) -> None:
        """Raise Overloaded if the slots must be granted within `turn_s` and are expected later."""
        wait_s = self._expected_wait_s(queue, cost, lane)
        if wait_s is not None and turn_s is not None and wait_s > turn_s:
            raise Overloaded(
                f"No place is expected to come free within {turn_s:.3g} seconds; try again later.",
                wait_s,
                "expected_wait",
            )

    def _expected_wait_s(self, queue: TenantQueue, cost: int, lane: Lane) -> float | None:
        """Return the expected wait of a tenant's next generation in seconds, None if unknown."""
        if not queue.pace.is_known:
            return None
        found = [
            expected_wait_s(
                _build_standing(queue, scope),
                [
                    _build_standing(each, scope)
                    for each in self._queues.values()
                    if each is not queue
                ],
                queue.waiting_in(scope.lanes)
                + max(cost, self._in_use.in_lanes(scope.lanes) + cost - scope.slots),
            )
            for scope in self._scopes(lane)
            if self._lacks_free(scope, cost) or not self._is_within_share(queue, cost, scope)
        ]
        return max([wait_s for wait_s in found if wait_s is not None], default=None)

    def _shed(self, queue: TenantQueue) -> None:
        """Make space in a full queue, or raise Overloaded.

        If the queue is full, drop the last entry of the tenant with most entries, unless that is
        about as many as `queue` has. Entries of resumed answers are never dropped.
        """
        if queue.waiting >= self._queue_of_tenant:
            raise self._queue_full_error(queue)
        if self.waiting < self._queue:
            return
        ends = [
            (other, lane, entries[-1].since)
            for other in self._queues.values()
            for lane, entries in other.by_lane.items()
            if entries and not entries[-1].is_resumed
        ]
        longest, lane, _ = max(
            ends, key=lambda end: (end[0].waiting, end[2]), default=(queue, None, 0.0)
        )
        if longest.waiting <= queue.waiting + 1:
            raise self._queue_full_error(queue)
        last = longest.by_lane[lane].pop()
        self._queued.add(lane, -1)
        if not last.admitted.done():
            last.admitted.set_exception(self._queue_full_error(longest))

    def _queue_full_error(self, own: TenantQueue) -> Overloaded:
        """Build the error for a full queue, with the waiting time of its first entry.

        A new request would wait about as long. Tenants are served fairly, so other tenants' queues
        count only if `own` is empty.
        """
        queues = [own] if own.waiting else self._queues.values()
        since = [
            entries[0].since for queue in queues for entries in queue.by_lane.values() if entries
        ]
        waited_s = time.monotonic() - min(since) if since else 0.0
        message = "Too many requests are waiting; try again later."
        return Overloaded(message, waited_s, "queue_full")

    def _pace_of(self, tenant: str) -> Pace:
        """Return the pace of a tenant. Paces stay in memory: their number is that of configured
        tenants.
        """
        pace = self._paces.get(tenant)
        if pace is None:
            pace = self._paces[tenant] = Pace()
        return pace

    def _remove_if_idle(self, tenant: str, queue: TenantQueue) -> None:
        """Forget the queue of a tenant that holds no slot and waits for none."""
        if not queue.in_use.total and not queue.waiting and self._queues.get(tenant) is queue:
            del self._queues[tenant]


class Permit:
    """Slots for one generation. See `Admission.permit`."""

    def __init__(
        self,
        admission: Admission,
        tenant: str,
        priority: int,
        cost: int,
        *,
        wait_s: float | None,
        first_token_s: float | None,
        max_expected_s: float | None,
        is_resumed: bool,
        lane: Lane,
    ) -> None:
        self._admission = admission
        self._tenant = tenant
        self._priority = priority
        self._cost = cost
        self._wait_s = wait_s
        self._first_token_s = first_token_s
        self._max_expected_s = max_expected_s
        self._is_resumed = is_resumed
        self._lane = lane

    async def __aenter__(self) -> Permit:
        await self._admission.enter(
            *(self._tenant, self._priority, self._cost, self._wait_s, self._first_token_s),
            max_expected_s=self._max_expected_s,
            is_resumed=self._is_resumed,
            lane=self._lane,
        )
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give the slots back."""
        self._admission.release(self._tenant, self._cost, self._lane)


def _grant_order(candidate: tuple[TenantQueue, Lane]) -> tuple[int, int, float]:
    """Return the sort key of a lane of a tenant's queue; the smallest gets the next free slots.

    A tenant with few slots does not wait for another's many beams. A tenant that would hold more
    slots than those beams does.
    """
    queue, lane = candidate
    first = queue.by_lane[lane][0]
    return -queue.priority, queue.in_use.total + first.cost, first.since


def _build_standing(queue: TenantQueue, scope: Scope) -> Standing:
    """Return the tenant's slots, queue and release rate within a scope."""
    taken = queue.in_use.in_lanes(scope.lanes)
    waiting = queue.waiting_in(scope.lanes)
    return Standing(queue.priority, taken, waiting, queue.pace.freed_per_s(taken, time.monotonic()))


def _min_optional(one: float, other: float | None) -> float:
    """Return the smaller of two numbers, ignoring None."""
    return one if other is None else min(one, other)
