"""How many requests replicas may have: what `admission` is told.

A place is a replica's. Which ones a request can have is said by its lane: those of the kinds that
can take it, and of these the ones with a weight where any works. What is in flight elsewhere, on a
replica that leaves, is drained or has just lost its weight, takes no place of these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from gateway.scheduling.kinds import Lane
from gateway.scheduling.queues import Scope
from gateway.scheduling.replica import Replica
from gateway.triton.model_capabilities import ModelCapabilities


class Places:
    """Of all replicas, which `replicas` gives."""

    def __init__(
        self,
        replicas: Callable[[], Iterable[Replica]],
        limit: Callable[[ModelCapabilities], int | None],
    ) -> None:
        """`limit` says how many requests a replica may have in flight, None without a limit."""
        self._replicas = replicas
        self._limit = limit

    def has_room(self, replica: Replica) -> bool:
        limit = self._limit(replica.engine.capabilities)
        return limit is None or replica.in_flight < limit

    def at(self, replica: Replica) -> int | None:
        """How many requests it may have; None without a limit, or while that is not known."""
        selection = replica.engine.last_selection
        return None if selection is None else self._limit(selection.capabilities)

    def now(self) -> int | None:
        """How many requests that any kind can take may be in flight, with those that are elsewhere;
        None without a limit."""
        used = self._used(None)
        places = self._of(used)
        if places is None:
            return None
        return places + sum([r.in_flight for r in self._replicas() if r not in used])

    def capacity(self, lane: Lane = None) -> int | None:
        """The places of a lane, were none of its replicas failing; None without a limit."""
        return self._of(self._used(lane, failing=True), failing=True)

    def scopes(self, lane: Lane, lanes: Collection[Lane], most: int) -> Sequence[Scope]:
        """As `admission.Scopes`, with no more places than `most` in each.

        A request that few replicas can take needs a place on these, and one of all that there are.
        """
        by_lane = {each: self._used(each) for each in {lane, None, *lanes, *self._lanes()}}
        own, common = by_lane[lane], by_lane[None]
        found = [Scope(most), self._scope(own, by_lane, most)]
        if set(own) < set(common):
            found.append(self._scope(common, by_lane, most))
        return found

    def _scope(
        self, used: Sequence[Replica], by_lane: Mapping[Lane, Sequence[Replica]], most: int
    ) -> Scope:
        key = frozenset(used)
        lanes = {lane for lane, own in by_lane.items() if key.issuperset(own)}
        places = self._of(used)
        if places is None:
            return Scope(most, lanes, key)
        whole = places
        for replica in self._replicas():
            within = _in_flight(replica, lanes)
            # What of others is here takes places, and what of these is elsewhere takes none.
            places += within - replica.in_flight if replica in key else within
        return Scope(min(places, most), lanes, key, shared=min(whole, most))

    def _lanes(self) -> set[Lane]:
        return {lane for replica in self._replicas() for lane in replica.lanes}

    def _used(self, lane: Lane, *, failing: bool = False) -> list[Replica]:
        """Those that a request of a lane goes to; `failing` ones too, which are left alone now."""
        able = [
            replica
            for replica in self._replicas()
            if replica.ready
            and (failing or replica.breaker.allows)
            and (lane is None or replica.kind in lane)
        ]
        if len(able) == 1:
            return able
        # What came before it was drained, and nothing else can take, still goes there.
        able = [replica for replica in able if replica.drained_at is None] or able
        return [replica for replica in able if replica.weight] or able

    def _of(self, replicas: Iterable[Replica], *, failing: bool = False) -> int | None:
        places = 0
        for replica in replicas:
            if replica.breaker.open and not failing:
                places += 1  # for the probe
                continue
            limit = self._limit(replica.engine.capabilities)
            if limit is None:
                return None
            places += limit
        return places


def _in_flight(replica: Replica, lanes: Collection[Lane]) -> int:
    """Those of these lanes."""
    of_none = replica.in_flight - replica.lanes.total() if None in lanes else 0
    return of_none + sum(count for lane, count in replica.lanes.items() if lane in lanes)
