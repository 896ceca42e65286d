"""Who may start now: a bounded number in flight, a bounded queue, a fair turn for each tenant.

The engine batches whatever it is given, and its own queue is first come, first served: a burst of
one tenant would be ahead of everybody. So the gateway lets in only as many as the engines run at
once and keeps the rest, by tenant, here.
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
from gateway.scheduling.queues import Scope, Scopes, Taken, TenantQueue, Waiting


class Admission:
    """Permits for generations. Belongs to one event loop; taking and giving back never waits for
    I/O.

    Each choice of a request asks for a place of its own, so that a request larger than what is free
    runs in turns, and nobody waits until enough is free for all of it. Only the beams of a search
    take their places together; they are never more than its tenant's share.

    Free places go to the tenant of the highest priority, among equals to the one that would then
    have the fewest, and of its generations to the first in line. One tenant alone gets at most
    `share` of the places, so that the next one to come finds one free.

    What only some replicas can take has a lane: it waits for places there, and in a line of its
    own, so that it stands before nothing that others can take.
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
        """`limit` is asked for the number of places now, `capacity` for that of a lane with all
        engines at work (as `limit` unless given), `scopes`, which is asked where there are lanes,
        for those of a lane. `queue` bounds who waits, all tenants together,
        `queue_of_tenant` those of one, and nobody waits longer than `wait_s` seconds."""
        self._limit = limit
        self._capacity = capacity or (lambda _: limit())
        self._scopes_of = scopes
        self._queue = queue
        self._queue_of_tenant = queue if queue_of_tenant is None else queue_of_tenant
        self._wait_s = wait_s
        self._share = share
        self._queues: dict[str, TenantQueue] = {}
        self._paces: dict[str, Pace] = {}
        self._taken = Taken()
        self._awaited = Taken()

    @property
    def in_flight(self) -> int:
        """The places that are taken."""
        return self._taken.total

    @property
    def waiting(self) -> int:
        return self._awaited.total

    @property
    def waiting_by_tenant(self) -> dict[str, int]:
        """Of tenants with any."""
        return {name: n for name, queue in self._queues.items() if (n := queue.waiting)}

    @property
    def places(self) -> int:
        """How many there are now."""
        return self._limit()

    @property
    def awaited(self) -> Collection[Lane]:
        """The lanes, but None, in which somebody waits."""
        return self._awaited.lanes.keys()

    def permit(
        self,
        tenant: str,
        priority: int = 0,
        *,
        cost: int = 1,
        wait_s: float | None = None,
        first_token_s: float | None = None,
        max_expected_s: float | None = None,
        goes_on: bool = False,
        lane: Lane = None,
    ) -> Permit:
        """`cost` places for a generation of `tenant`, to be taken with `async with`.

        Entering raises Overloaded at once when the queue is full, and later when no place came
        free in time; TimeoutError after `wait_s` seconds, if that is less than everybody's limit.
        With `first_token_s` it is Overloaded as soon as its turn cannot be expected in time for a
        first token after so many seconds, and at once when its turn is not expected within
        `max_expected_s`. Nobody is refused who need not wait.

        The next one of a request that has begun (`goes_on`) is first in its tenant's line, and
        waits there for as long as `wait_s` allows, whoever else waits. Each such request has one of
        these at most, so they need no bound.
        """
        limit = wait_s if goes_on else _least(self._wait_s, wait_s)
        first_token_s = None if goes_on else first_token_s
        return Permit(
            self,
            tenant,
            priority,
            cost,
            wait_s=limit,
            first_token_s=first_token_s,
            max_expected_s=max_expected_s,
            goes_on=goes_on,
            lane=lane,
        )

    def answered(self, tenant: str, seconds: float) -> None:
        """To be told of a first token: how long after its place it came."""
        self._pace(tenant).answered(seconds)

    def largest(self, lane: Lane = None) -> int | None:
        """The greatest cost that can ever have its turn; None while no engine is there."""
        capacity = self._capacity(lane)
        return self._most(capacity) if capacity else None

    async def enter(
        self,
        tenant: str,
        priority: int,
        cost: int,
        wait_s: float | None,
        first_token_s: float | None,
        *,
        max_expected_s: float | None,
        goes_on: bool,
        lane: Lane,
    ) -> None:
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = TenantQueue(self._pace(tenant))
        queue.priority = priority
        line = queue.lines.get(lane)
        if not line and self._is_free(queue, cost, lane):
            self._admit(queue, cost, lane)
            return
        turn_s = wait_s
        waiting = Waiting(cost, asyncio.get_running_loop().create_future(), goes_on)
        if goes_on:
            line = queue.lines.setdefault(lane, deque())
            line.appendleft(waiting)
        else:
            try:
                if first_token_s is not None:
                    turn_s = _least(max(0.0, first_token_s - queue.pace.first_token_s), wait_s)
                    self._look_ahead(queue, cost, lane, _least(turn_s, max_expected_s))
                self._shed(queue)
            except Overloaded:
                self._tidy(tenant, queue)
                raise
            line = queue.lines.setdefault(lane, deque())
            line.append(waiting)
        self._awaited.add(lane, 1)
        self.fill()
        try:
            async with asyncio.timeout(turn_s):
                await waiting.admitted
        except BaseException as error:
            if waiting in line:
                line.remove(waiting)
                self._awaited.add(lane, -1)
            elif waiting.is_admitted:
                self.leave(tenant, cost, lane)  # in the moment in which it gave up
            self._tidy(tenant, queue)
            self.fill()  # it may have been the one that places were kept for
            late = turn_s is not None and turn_s != wait_s
            if isinstance(error, TimeoutError) and (late or wait_s == self._wait_s):
                raise Overloaded(
                    f"No place came free within {turn_s:.3g} seconds; try again later.",
                    max(turn_s or 0.0, (late and self._expected_s(queue, cost, lane)) or 0.0),
                    "too_late" if late else "queue_timeout",
                ) from None
            raise

    def leave(self, tenant: str, cost: int, lane: Lane = None) -> None:
        queue = self._queues[tenant]
        self._admit(queue, -cost, lane)
        self._tidy(tenant, queue)
        self.fill()

    def fill(self) -> set[object]:
        """Hands out the places that are free; to be called when the limit may have grown.

        Returns the keys of the scopes in which somebody is first who needs more than is free.
        """
        kept: set[object] = set()
        found: dict[Lane, Sequence[Scope]] = {}
        while self.waiting:
            for lane in {
                lane
                for queue in self._queues.values()
                for lane, line in queue.lines.items()
                if line
            }:
                if lane not in found:
                    found[lane] = self._scopes(lane)
            able = [
                (queue, lane)
                for queue in self._queues.values()
                for lane, line in queue.lines.items()
                if line
                and all(scope.key not in kept for scope in found[lane])
                and all(self._may_have(queue, line[0].cost, scope) for scope in found[lane])
            ]
            if not able:
                break
            queue, lane = min(able, key=_turn)
            cost = queue.lines[lane][0].cost
            lacking = {scope.key for scope in found[lane] if self._lacks(scope, cost)}
            if lacking:
                kept |= lacking  # what is free is kept until it is enough
                continue
            waiting = queue.lines[lane].popleft()
            self._awaited.add(lane, -1)
            if not waiting.admitted.cancelled():
                self._admit(queue, waiting.cost, lane)
                waiting.admitted.set_result(None)
        return kept

    def _is_free(self, queue: TenantQueue, cost: int, lane: Lane) -> bool:
        """Whether a tenant may have so many places at once, before nobody who waits for them."""
        kept = self.fill() if self.waiting else ()
        for scope in self._scopes(lane):
            if scope.key in kept or self._lacks(scope, cost):
                return False
            if not self._may_have(queue, cost, scope):
                return False
        return True

    def _scopes(self, lane: Lane) -> Sequence[Scope]:
        lanes, awaited = self._taken.lanes, self._awaited.lanes
        if self._scopes_of is None or (lane is None and not lanes and not awaited):
            return (Scope(self._limit()),)
        return self._scopes_of(lane, lanes.keys() | awaited.keys())

    def _lacks(self, scope: Scope, cost: int) -> bool:
        """Whether it has not so many places free."""
        return self._taken.within(scope.lanes) + cost > scope.places

    def _admit(self, queue: TenantQueue, cost: int, lane: Lane) -> None:
        queue.pace.changes(cost, time.monotonic())
        queue.taken.add(lane, cost)
        self._taken.add(lane, cost)

    def _may_have(self, queue: TenantQueue, cost: int, scope: Scope) -> bool:
        """Whether the tenant's share allows so many more."""
        most = self._most(max(scope.places, scope.shared))
        return queue.taken.within(scope.lanes) + cost <= most

    def _most(self, limit: int) -> int:
        """A tenant's share."""
        return max(1, int(limit * self._share()))

    def _look_ahead(self, queue: TenantQueue, cost: int, lane: Lane, turn_s: float | None) -> None:
        """Raises Overloaded when a turn that must come within `turn_s` cannot be expected then."""
        wait_s = self._expected_s(queue, cost, lane)
        if wait_s is not None and turn_s is not None and wait_s > turn_s:
            raise Overloaded(
                f"No place is expected to come free within {turn_s:.3g} seconds; try again later.",
                wait_s,
                "expected_wait",
            )

    def _expected_s(self, queue: TenantQueue, cost: int, lane: Lane) -> float | None:
        """How long the next one of a tenant will wait; None where that is not known."""
        if not queue.pace.known:
            return None
        found = [
            expected_wait_s(
                _standing(queue, scope),
                [_standing(each, scope) for each in self._queues.values() if each is not queue],
                queue.waiting_in(scope.lanes)
                + max(cost, self._taken.within(scope.lanes) + cost - scope.places),
            )
            for scope in self._scopes(lane)
            if self._lacks(scope, cost) or not self._may_have(queue, cost, scope)
        ]
        return max([wait_s for wait_s in found if wait_s is not None], default=None)

    def _shed(self, queue: TenantQueue) -> None:
        """Raises Overloaded when waiting is no use.

        In a full queue, of the tenants that wait with requests which have not begun, the one with
        most in it gives up its last such for another's.
        """
        if queue.waiting >= self._queue_of_tenant:
            raise self._queue_full(queue)
        if self.waiting < self._queue:
            return
        ends = [
            (other, lane, line[-1].since)
            for other in self._queues.values()
            for lane, line in other.lines.items()
            if line and not line[-1].goes_on
        ]
        longest, lane, _ = max(
            ends, key=lambda end: (end[0].waiting, end[2]), default=(queue, None, 0.0)
        )
        if longest.waiting <= queue.waiting + 1:
            raise self._queue_full(queue)
        last = longest.lines[lane].pop()
        self._awaited.add(lane, -1)
        if not last.admitted.done():
            last.admitted.set_exception(self._queue_full(longest))

    def _queue_full(self, own: TenantQueue) -> Overloaded:
        """With the time that the first in line has waited: whoever comes now would as well.

        Tenants take turns, so another's line is asked only by who has none.
        """
        queues = [own] if own.waiting else self._queues.values()
        since = [line[0].since for queue in queues for line in queue.lines.values() if line]
        waited_s = time.monotonic() - min(since) if since else 0.0
        message = "Too many requests are waiting; try again later."
        return Overloaded(message, waited_s, "queue_full")

    def _pace(self, tenant: str) -> Pace:
        """It is kept: there are no more tenants than the configuration has had."""
        pace = self._paces.get(tenant)
        if pace is None:
            pace = self._paces[tenant] = Pace()
        return pace

    def _tidy(self, tenant: str, queue: TenantQueue) -> None:
        if not queue.taken.total and not queue.waiting and self._queues.get(tenant) is queue:
            del self._queues[tenant]


class Permit:
    """See `Admission.permit`."""

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
        goes_on: bool,
        lane: Lane,
    ) -> None:
        self._admission = admission
        self._tenant = tenant
        self._priority = priority
        self._cost = cost
        self._wait_s = wait_s
        self._first_token_s = first_token_s
        self._max_expected_s = max_expected_s
        self._goes_on = goes_on
        self._lane = lane

    async def __aenter__(self) -> Permit:
        await self._admission.enter(
            *(self._tenant, self._priority, self._cost, self._wait_s, self._first_token_s),
            max_expected_s=self._max_expected_s,
            goes_on=self._goes_on,
            lane=self._lane,
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
        self._admission.leave(self._tenant, self._cost, self._lane)


def _turn(line: tuple[TenantQueue, Lane]) -> tuple[int, int, float]:
    """Of those that wait, the least is next.

    A tenant with few places does not wait for another's many beams; one with more than those does.
    """
    queue, lane = line
    first = queue.lines[lane][0]
    return -queue.priority, queue.taken.total + first.cost, first.since


def _standing(queue: TenantQueue, scope: Scope) -> Standing:
    taken = queue.taken.within(scope.lanes)
    waiting = queue.waiting_in(scope.lanes)
    return Standing(queue.priority, taken, waiting, queue.pace.freed_per_s(taken, time.monotonic()))


def _least(one: float, other: float | None) -> float:
    return one if other is None else min(one, other)
