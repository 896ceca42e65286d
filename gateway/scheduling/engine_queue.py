"""Engine queue: generations wait here, per tenant, until an engine has a free slot.

Engines serve their own queue first come, first served, so one tenant's burst would delay all
other tenants. The gateway therefore sends only as many requests as the engines run at once. All
further requests wait in this queue.

See decisions 024 and 075 in docs/decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from gateway.errors import Overloaded
from gateway.scheduling.fair_budget import Ask, FairBudget, Permit, min_optional
from gateway.scheduling.forecast import MIN_SAMPLES, Standing, expected_wait_s
from gateway.scheduling.kinds import Lane
from gateway.scheduling.queues import Scope, Scopes, TenantQueue


class EngineQueue(FairBudget):
    """Engine slots that tenants share fairly, with a queue for requests that wait for a slot.

    A request is refused if its expected wait is too long.

    Each choice of a request takes its slot separately. A request with many choices therefore starts
    its first choices as soon as slots are free. Only a beam search takes the slots of all its beams
    at once; the caller must check with `max_cost` that so many slots exist.

    A lane is the set of model variants that can run a generation. Each lane has a queue of its own:
    see `FairPool`.
    """

    def __init__(
        self,
        limit: Callable[[], int],
        share: Callable[[], float] = lambda: 1.0,
        *,
        capacity: Callable[[Lane], int] | None = None,
        scopes: Scopes | None = None,
        queue: int,
        wait_s: float,
    ) -> None:
        """Start with all slots free and an empty queue.

        Args:
            limit: returns the current number of slots.
            share: returns the fraction of the slots that one tenant may hold.
            capacity: returns the number of slots that a lane has while all its replicas work. The
                default is `limit`.
            scopes: returns the `queues.Scope` objects of a lane. A generation of the lane needs
                free slots in each of them. Called only if a lane other than None is in use.
            queue: maximum number of waiting generations of all tenants together.
            wait_s: maximum time in the queue, in seconds.
        """
        super().__init__(limit, share, scopes=scopes, queue=queue, wait_s=wait_s)
        self._capacity = capacity or (lambda _: limit())

    @property
    def queued_lanes(self) -> Collection[Lane]:
        """Lanes with queued generations. The lane None (all model variants) is left out."""
        return self._pool.queued.lanes.keys()

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
        """Return a permit for the `cost` slots of a generation. See `FairBudget.permit`.

        Args:
            tenant: the tenant's name.
            priority: the tenant's priority; a greater number is served first.
            cost: number of slots.
            wait_s: maximum time in the queue in seconds, if less than the queue's own limit.
            first_token_s: maximum time in seconds until the first token. The generation is refused
                if its first token is expected later.
            max_expected_s: maximum expected time in the queue in seconds. The generation is refused
                if its slots are expected later. Ignored without `first_token_s`.
            is_resumed: True for a further choice of a request that has started.
            lane: the model variants that can run the generation; None means all.

        Entering the permit raises:

        - Overloaded if the queue is full, if the expected wait is too long, or if no slot became
          free in time;
        - TimeoutError if `wait_s` has passed and is less than the queue's own limit.
        """
        limit_s = wait_s if is_resumed else min_optional(self._wait_s, wait_s)
        wanted_s = None if is_resumed else first_token_s
        return Permit(
            self,
            Ask(tenant, priority, cost, limit_s, wanted_s, max_expected_s, is_resumed, lane),
        )

    def record_first_token(self, tenant: str, seconds: float) -> None:
        """Record that a request got its first token `seconds` after its slot was granted."""
        self._pool.pace_of(tenant).record_first_token(seconds)

    def max_cost(self, lane: Lane = None) -> int | None:
        """Return how many slots of a lane one permit may take; None if the lane has no slots."""
        capacity = self._capacity(lane)
        return self._pool.share_of(capacity) if capacity else None

    def _limit_turn(self, queue: TenantQueue, ask: Ask) -> float | None:
        if ask.first_token_s is None:
            return ask.wait_s
        turn_s = min_optional(max(0.0, ask.first_token_s - queue.pace.first_token_s), ask.wait_s)
        limit_s = min_optional(turn_s, ask.max_expected_s)
        expected_s = self._expect_wait(queue, ask.cost, ask.lane)
        if expected_s is not None and expected_s > limit_s:
            raise Overloaded(
                f"No slot is expected to become free within {limit_s:.3g} seconds; try again "
                "later.",
                expected_s,
                "expected_wait",
            )
        return turn_s

    def _expect_wait(self, queue: TenantQueue, cost: int, lane: Lane) -> float | None:
        if not queue.pace.is_known and queue.waiting < MIN_SAMPLES:
            return None
        pool = self._pool
        found = [
            expected_wait_s(
                _build_standing(queue, scope),
                [
                    _build_standing(each, scope)
                    for each in pool.queues.values()
                    if each is not queue
                ],
                queue.waiting_in(scope.lanes)
                + max(cost, pool.in_use.in_lanes(scope.lanes) + cost - scope.slots),
            )
            for scope in pool.scopes(lane)
            if pool.lacks_free(scope, cost) or not pool.is_within_share(queue, cost, scope)
        ]
        return max([wait_s for wait_s in found if wait_s is not None], default=None)


def _build_standing(queue: TenantQueue, scope: Scope) -> Standing:
    """Return the `Standing` of a tenant, which counts only the lanes of `scope`."""
    taken = queue.in_use.in_lanes(scope.lanes)
    waiting = queue.waiting_in(scope.lanes)
    return Standing(queue.priority, taken, waiting, queue.pace.freed_per_s(taken, time.monotonic()))
