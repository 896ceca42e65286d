"""Slots of replicas: maximum numbers of concurrent requests, in total and for each lane.

A lane is the set of model variants that can run a request. Each slot belongs to a replica. A
request can use the slots of all working replicas whose model variant is in its lane. A drained
replica or a replica of weight 0 contributes no slots, unless there are only such replicas. Requests
may still run on a replica without slots. They do not occupy slots of other replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from gateway.scheduling.kinds import Lane
from gateway.scheduling.queues import Scope
from gateway.scheduling.replica import Replica
from gateway.triton.model_capabilities import ModelCapabilities


class SlotPool:
    """Slots of all replicas. `EngineQueue` grants them to requests."""

    def __init__(
        self,
        replicas: Callable[[], Iterable[Replica]],
        limit: Callable[[ModelCapabilities], int | None],
    ) -> None:
        """Create a pool. The callbacks are called each time when slots are counted.

        Args:
            replicas: returns the replicas whose slots are counted.
            limit: returns how many requests a replica may have in flight; None means no limit.
        """
        self._replicas = replicas
        self._limit = limit

    def has_free_slot(self, replica: Replica) -> bool:
        """Return True if the replica is below its limit."""
        limit = self._limit(replica.engine.capabilities)
        return limit is None or replica.in_flight < limit

    def slots_of(self, replica: Replica) -> int | None:
        """Return the maximum number of concurrent requests on a replica. Return None if unknown.

        The number is unknown if no limit is configured, or if no poll has found a model on the
        replica since this process started.
        """
        selection = replica.engine.last_selection
        return None if selection is None else self._limit(selection.capabilities)

    def current_limit(self) -> int | None:
        """Return the maximum number of requests in flight on all replicas; None for no limit.

        A replica that gets no new requests, such as a drained replica, adds the number of its
        running requests to the limit. `EngineQueue` counts these requests as in flight. Without
        this addition, they would use up slots of other replicas.
        """
        used = self._find_replicas(None)
        slots = self._count_slots(used)
        if slots is None:
            return None
        return slots + sum([r.in_flight for r in self._replicas() if r not in used])

    def capacity(self, lane: Lane = None) -> int | None:
        """Return the number of slots of a lane. Return None without a limit.

        Replicas whose circuit breaker is open are counted with all their slots.
        """
        return self._count_slots(self._find_replicas(lane, failing=True), failing=True)

    def scopes(self, lane: Lane, lanes: Collection[Lane], max_slots: int) -> Sequence[Scope]:
        """Return the scopes in which a request of `lane` needs a free slot.

        A scope is a group of lanes that share slots. There are two or three scopes:

        - `max_slots` slots, shared by all lanes;
        - the slots of the replicas that can run `lane`, shared by `lane` and all lanes that can run
          on no other replicas;
        - the slots of all usable replicas, if some of these replicas cannot run `lane`.

        Args:
            lane: the lane of the request.
            lanes: all lanes with slots in use or queued requests.
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
            # `within` is the number of this replica's requests whose lane is in the scope. The
            # queue later subtracts these requests from the slots of the scope. If the scope
            # contains the replica, subtract the replica's other requests here, because they occupy
            # its slots. If the scope does not contain the replica, add `within`, because these
            # requests occupy no slot of the scope.
            slots += within - replica.in_flight if replica in key else within
        return Scope(min(slots, max_slots), lanes, key, shared=min(all_slots, max_slots))

    def _lanes(self) -> set[Lane]:
        return {lane for replica in self._replicas() for lane in replica.lanes}

    def _find_replicas(self, lane: Lane, *, failing: bool = False) -> list[Replica]:
        """Return the replicas that get new requests of a lane.

        Replicas whose circuit breaker is open are included only if `failing` is True.
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
        # Count drained replicas only if no other replica can run the lane. They still get requests
        # that arrived before the drain and that no other replica can run.
        able = [replica for replica in able if replica.drained_at is None] or able
        return [replica for replica in able if replica.weight] or able

    def _count_slots(self, replicas: Iterable[Replica], *, failing: bool = False) -> int | None:
        """Return the total number of slots of these replicas.

        Return None if a replica has no limit. A replica whose circuit breaker is open counts as one
        slot, or with all its slots if `failing`.
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
    """Return the number of requests in flight on a replica that belong to one of these lanes."""
    of_none = replica.in_flight - replica.lanes.total() if None in lanes else 0
    return of_none + sum(count for lane, count in replica.lanes.items() if lane in lanes)
