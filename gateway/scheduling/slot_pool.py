"""Slots of replicas: how many requests may run at once, in total and for each lane.

Each slot belongs to a replica. A request can use the slots of the replicas in its lane that work.
Among these, replicas that are drained or have weight 0 count only if there is no other. Requests
that are in flight on replicas which do not count use none of the slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from gateway.scheduling.kinds import Lane
from gateway.scheduling.queues import Scope
from gateway.scheduling.replica import Replica
from gateway.triton.model_capabilities import ModelCapabilities


class SlotPool:
    """The slots of all replicas."""

    def __init__(
        self,
        replicas: Callable[[], Iterable[Replica]],
        limit: Callable[[ModelCapabilities], int | None],
    ) -> None:
        """Count the slots of the replicas that `replicas` returns.

        `limit` returns how many requests a replica may have in flight, None without a limit.
        """
        self._replicas = replicas
        self._limit = limit

    def has_free_slot(self, replica: Replica) -> bool:
        """Return True if the replica is below its limit."""
        limit = self._limit(replica.engine.capabilities)
        return limit is None or replica.in_flight < limit

    def slots_of(self, replica: Replica) -> int | None:
        """Return how many requests a replica may run. Return None without a limit.

        Also return None for a replica that was not seen serving yet.
        """
        selection = replica.engine.last_selection
        return None if selection is None else self._limit(selection.capabilities)

    def current_limit(self) -> int | None:
        """Return how many requests may be in flight on all replicas, None without a limit.

        The limit includes the requests that are in flight on replicas which take no new requests.
        """
        used = self._find_replicas(None)
        slots = self._count_slots(used)
        if slots is None:
            return None
        return slots + sum([r.in_flight for r in self._replicas() if r not in used])

    def capacity(self, lane: Lane = None) -> int | None:
        """Return the number of slots of a lane, as if all its circuit breakers were closed.

        Return None without a limit.
        """
        return self._count_slots(self._find_replicas(lane, failing=True), failing=True)

    def scopes(self, lane: Lane, lanes: Collection[Lane], max_slots: int) -> Sequence[Scope]:
        """Return the scopes in which a request of `lane` needs slots.

        A request needs one of `max_slots` slots and a slot on the replicas of its lane. If these
        are only a part of the usable replicas, the request also needs one of the slots of all
        usable replicas.

        Args:
            lane: the lane of the request.
            lanes: the other lanes in use.
            max_slots: maximum number of slots in each scope.
        """
        by_lane = {each: self._find_replicas(each) for each in {lane, None, *lanes, *self._lanes()}}
        own, common = by_lane[lane], by_lane[None]
        found = [Scope(max_slots), self._scope(own, by_lane, max_slots)]
        if set(own) < set(common):
            found.append(self._scope(common, by_lane, max_slots))
        return found

    def _scope(
        self, used: Sequence[Replica], by_lane: Mapping[Lane, Sequence[Replica]], max_slots: int
    ) -> Scope:
        key = frozenset(used)
        lanes = {lane for lane, own in by_lane.items() if key.issuperset(own)}
        slots = self._count_slots(used)
        if slots is None:
            return Scope(max_slots, lanes, key)
        all_slots = slots
        for replica in self._replicas():
            within = _in_flight(replica, lanes)
            # Requests of other lanes on these replicas use slots of the scope: subtract them.
            # Requests of these lanes on other replicas use none: add them to the limit, because
            # they are counted as in use.
            slots += within - replica.in_flight if replica in key else within
        return Scope(min(slots, max_slots), lanes, key, shared=min(all_slots, max_slots))

    def _lanes(self) -> set[Lane]:
        return {lane for replica in self._replicas() for lane in replica.lanes}

    def _find_replicas(self, lane: Lane, *, failing: bool = False) -> list[Replica]:
        """Return the replicas to which requests of a lane go.

        With `failing`, replicas whose circuit breaker is open are included.
        """
        able = [
            replica
            for replica in self._replicas()
            if replica.ready
            and (failing or replica.breaker.allows)
            and (lane is None or replica.variant in lane)
        ]
        if len(able) == 1:
            return able
        # Use drained replicas only if there is no other: requests that came before the drain, and
        # that no other replica can run, still go to them.
        able = [replica for replica in able if replica.drained_at is None] or able
        return [replica for replica in able if replica.weight] or able

    def _count_slots(self, replicas: Iterable[Replica], *, failing: bool = False) -> int | None:
        """Return the total number of slots of these replicas, None if one of them has no limit.

        A replica whose circuit breaker is open counts as one slot, unless `failing`.
        """
        slots = 0
        for replica in replicas:
            if replica.breaker.is_open and not failing:
                slots += 1  # one slot for the probe
                continue
            limit = self._limit(replica.engine.capabilities)
            if limit is None:
                return None
            slots += limit
        return slots


def _in_flight(replica: Replica, lanes: Collection[Lane]) -> int:
    """Return how many requests of these lanes are in flight on a replica."""
    of_none = replica.in_flight - replica.lanes.total() if None in lanes else 0
    return of_none + sum(count for lane, count in replica.lanes.items() if lane in lanes)
