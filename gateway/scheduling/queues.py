"""Data classes of `fair_pool`: slots in use and queued generations, by tenant and lane.

A lane is the set of model variants that can run a request.

See decision 024 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.scheduling.forecast import Pace
from gateway.scheduling.kinds import Lane


class Scope(NamedTuple):
    """Group of lanes that share slots. A generation needs a free slot in all scopes of its lane.

    Attributes:
        slots: number of slots that the lanes may use together.
        lanes: the lanes that share the slots; None stands for all lanes.
        key: identifies the scope.
        shared: number of slots before the slots of other lanes are subtracted. While requests of
            other lanes use the scope's replicas, `slots` is smaller than `shared`. One tenant may
            hold its configured fraction of the greater of the two numbers.
    """

    slots: int
    lanes: Collection[Lane] | None = None
    key: object = None
    shared: int = 0


Scopes = Callable[[Lane, Collection[Lane]], Sequence[Scope]]
"""Function that returns the scopes in which a request needs slots.

Its arguments are the lane of the request, and all lanes that have slots in use or queued requests.
"""


@dataclass(slots=True)
class SlotCount:
    """Number of slots or queue entries, in total and by lane.

    `lanes` has no entry for the lane None (all model variants); `total` includes it.
    """

    total: int = 0
    lanes: dict[Lane, int] = field(default_factory=dict)

    def add(self, lane: Lane, more: int) -> None:
        """Add `more` slots of a lane; a negative number removes them."""
        self.total += more
        if lane is not None:
            self.lanes[lane] = self.lanes.get(lane, 0) + more
            if not self.lanes[lane]:
                del self.lanes[lane]

    def in_lanes(self, lanes: Collection[Lane] | None) -> int:
        """Return the number of slots of these lanes; None stands for all lanes."""
        if lanes is None:
            return self.total
        of_none = self.total - sum(self.lanes.values()) if None in lanes else 0
        return of_none + sum(count for lane, count in self.lanes.items() if lane in lanes)


@dataclass(eq=False, slots=True)
class QueueEntry:
    """A queued generation that needs `cost` slots. `admitted` completes when they are granted."""

    cost: int
    admitted: asyncio.Future[None]
    is_resumed: bool = False
    """True if another choice or batch of the same client request has started already."""
    since: float = field(default_factory=time.monotonic)

    @property
    def is_admitted(self) -> bool:
        """True if the slots were granted."""
        done = self.admitted.done() and not self.admitted.cancelled()
        return done and self.admitted.exception() is None


@dataclass(slots=True)
class TenantQueue:
    """A tenant's slots in use, and its queued generations by lane in order of arrival."""

    pace: Pace
    priority: int = 0
    in_use: SlotCount = field(default_factory=SlotCount)
    by_lane: dict[Lane, deque[QueueEntry]] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        """Number of queued generations."""
        return sum(map(len, self.by_lane.values()))

    def waiting_in(self, lanes: Collection[Lane] | None) -> int:
        """Return the number of queued generations in these lanes; None stands for all lanes."""
        if lanes is None:
            return self.waiting
        return sum([len(line) for lane, line in self.by_lane.items() if lane in lanes])
