"""Fair scheduling: the rules that decide which queued entry of which tenant gets a free slot.

See decision 024 in docs/decisions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from gateway.scheduling.forecast import Pace
from gateway.scheduling.kinds import Lane
from gateway.scheduling.queues import QueueEntry, Scope, Scopes, SlotCount, TenantQueue


class FairPool:
    """Slots in use and entries in queues, by tenant and lane.

    Free slots go to the waiting tenant with the highest priority. Among tenants of equal priority,
    free slots go to the tenant that holds the fewest slots, counting the new ones. Within a
    tenant's queue, the first entry gets the slots. A tenant never holds more than its configured
    fraction of the slots, even if no other tenant waits. Another tenant that arrives later
    therefore finds a free slot.

    A lane is the set of model variants that can run a request. Each tenant has one queue for each
    lane. Entries that wait for the replicas of one lane therefore never delay entries that other
    replicas can run.

    Attributes:
        queues: queues of all tenants that hold slots or wait for slots, by tenant name.
        in_use: number of slots in use, in total and by lane.
        queued: number of waiting entries, in total and by lane.
    """

    def __init__(
        self, limit: Callable[[], int], share: Callable[[], float], scopes: Scopes | None = None
    ) -> None:
        """Start with all slots free. `FairBudget` describes the arguments."""
        self._limit = limit
        self._share = share
        self._scopes_of = scopes
        # Statistics by tenant. They are never removed, because the number of tenants is limited by
        # the configuration.
        self._paces: dict[str, Pace] = {}
        self.queues: dict[str, TenantQueue] = {}
        self.in_use = SlotCount()
        self.queued = SlotCount()

    @property
    def limit(self) -> int:
        """Current number of slots."""
        return self._limit()

    def pace_of(self, tenant: str) -> Pace:
        """Return the speed statistics of a tenant. The first call for a tenant creates them."""
        pace = self._paces.get(tenant)
        if pace is None:
            pace = self._paces[tenant] = Pace()
        return pace

    def queue_of(self, tenant: str) -> TenantQueue:
        """Return the queue of a tenant. If the tenant has no queue, add an empty queue."""
        queue = self.queues.get(tenant)
        if queue is None:
            queue = self.queues[tenant] = TenantQueue(self.pace_of(tenant))
        return queue

    def take_free(self, queue: TenantQueue, cost: int, lane: Lane) -> bool:
        """Take `cost` slots for the tenant of `queue`. Return True on success.

        Return False if the tenant already has queued entries for this lane, if too few slots are
        free, if the free slots are reserved for a queued entry, or if the tenant would exceed its
        share of the slots.
        """
        if queue.by_lane.get(lane):
            return False
        reserved = self.grant() if self.queued.total else ()
        for scope in self.scopes(lane):
            if scope.key in reserved or self.lacks_free(scope, cost):
                return False
            if not self.is_within_share(queue, cost, scope):
                return False
        self._count(queue, cost, lane)
        return True

    def release(self, tenant: str, cost: int, lane: Lane) -> None:
        """Give back `cost` slots of a tenant, and grant them to queued entries."""
        queue = self.queues[tenant]
        self._count(queue, -cost, lane)
        self.remove_if_idle(tenant)
        self.grant()

    def append(self, queue: TenantQueue, lane: Lane, entry: QueueEntry) -> None:
        """Add an entry at the end of the tenant's queue, or at the front if it `is_resumed`."""
        entries = queue.by_lane.setdefault(lane, deque())
        if entry.is_resumed:
            entries.appendleft(entry)
        else:
            entries.append(entry)
        self.queued.add(lane, 1)

    def discard(self, queue: TenantQueue, lane: Lane, entry: QueueEntry) -> bool:
        """Remove an entry from its queue. Return False if it is no longer in the queue."""
        entries = queue.by_lane[lane]
        if entry not in entries:
            return False
        entries.remove(entry)
        self.queued.add(lane, -1)
        return True

    def pop_last(self, queue: TenantQueue, lane: Lane) -> QueueEntry:
        """Remove the last entry from a tenant's queue for `lane`, and return the entry."""
        self.queued.add(lane, -1)
        return queue.by_lane[lane].pop()

    def remove_if_idle(self, tenant: str) -> None:
        """Remove the queue of a tenant that holds no slot and has no queued entry."""
        queue = self.queues.get(tenant)
        if queue is not None and not queue.in_use.total and not queue.waiting:
            del self.queues[tenant]

    def grant(self) -> set[object]:
        """Grant free slots to queued entries.

        If the next entry needs more slots of a `queues.Scope` than are free, the free slots of this
        scope are reserved for the entry: no other entry gets them. Return the keys of all scopes
        with reserved slots.
        """
        reserved: set[object] = set()
        found: dict[Lane, Sequence[Scope]] = {}
        while self.queued.total:
            able = []
            for queue in self.queues.values():
                for lane, entries in queue.by_lane.items():
                    if not entries:
                        continue
                    if lane not in found:
                        found[lane] = self.scopes(lane)
                    if all(
                        scope.key not in reserved
                        and self.is_within_share(queue, entries[0].cost, scope)
                        for scope in found[lane]
                    ):
                        able.append((queue, lane))
            if not able:
                break
            queue, lane = min(able, key=_grant_order)
            cost = queue.by_lane[lane][0].cost
            lacking = {scope.key for scope in found[lane] if self.lacks_free(scope, cost)}
            if lacking:
                reserved |= lacking  # reserve the free slots until there are enough for this entry
                continue
            entry = queue.by_lane[lane].popleft()
            self.queued.add(lane, -1)
            if not entry.admitted.cancelled():
                self._count(queue, entry.cost, lane)
                entry.admitted.set_result(None)
        return reserved

    def scopes(self, lane: Lane) -> Sequence[Scope]:
        """Return the `queues.Scope` objects of `lane`. An entry needs free slots in each scope."""
        used, awaited = self.in_use.lanes, self.queued.lanes
        if self._scopes_of is None or (lane is None and not used and not awaited):
            return (Scope(self._limit()),)
        return self._scopes_of(lane, used.keys() | awaited.keys())

    def lacks_free(self, scope: Scope, cost: int) -> bool:
        """Return True if fewer than `cost` slots of the scope are free."""
        return self.in_use.in_lanes(scope.lanes) + cost > scope.slots

    def is_within_share(self, queue: TenantQueue, cost: int, scope: Scope) -> bool:
        """Return True if `cost` more slots of the scope do not exceed the tenant's share."""
        share = self.share_of(max(scope.slots, scope.shared))
        return queue.in_use.in_lanes(scope.lanes) + cost <= share

    def share_of(self, limit: int) -> int:
        """Return how many of `limit` slots one tenant may hold. The result is at least 1."""
        return max(1, int(limit * self._share()))

    def _count(self, queue: TenantQueue, cost: int, lane: Lane) -> None:
        """Count `cost` more slots as in use by a tenant; a negative cost releases them."""
        queue.pace.change_slots(cost, time.monotonic())
        queue.in_use.add(lane, cost)
        self.in_use.add(lane, cost)


def _grant_order(candidate: tuple[TenantQueue, Lane]) -> tuple[int, int, float]:
    """Return the sort key of a tenant's queue for one lane. The smallest key gets the free slots.

    The key includes the number of slots that the tenant would hold with the queue's first entry. A
    beam search with many beams is therefore served after tenants that would hold fewer slots.
    """
    queue, lane = candidate
    first = queue.by_lane[lane][0]
    return -queue.priority, queue.in_use.total + first.cost, first.since
