"""Counters of `fair_pool`: slots in use and queued generations, by tenant and lane.

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
    """Slots that `lanes` share (None: all lanes): the number that they may use together.

    Attributes:
        slots: number of slots.
        lanes: the lanes that share them.
        key: identifies the scope.
        shared: slots of which a tenant gets its share, if more than `slots`; slots that other lanes
            use now shrink every tenant's share equally.
    """

    slots: int
    lanes: Collection[Lane] | None = None
    key: object = None
    shared: int = 0


Scopes = Callable[[Lane, Collection[Lane]], Sequence[Scope]]
"""Function that returns the scopes in which a request of a lane needs slots.

Its second argument is the other lanes in use.
"""


@dataclass(slots=True)
class SlotCount:
    """A number of slots, in total and by lane. The lane None is counted in the total only."""

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
        """Return the slots of these lanes; None stands for all lanes."""
        if lanes is None:
            return self.total
        of_none = self.total - sum(self.lanes.values()) if None in lanes else 0
        return of_none + sum(count for lane, count in self.lanes.items() if lane in lanes)


@dataclass(eq=False, slots=True)
class QueueEntry:
    """A queued generation, which needs `cost` slots."""

    cost: int
    admitted: asyncio.Future[None]
    is_resumed: bool = False
    """True if the generation continues an answer that has started."""
    since: float = field(default_factory=time.monotonic)

    @property
    def is_admitted(self) -> bool:
        """True if the slots were granted."""
        done = self.admitted.done() and not self.admitted.cancelled()
        return done and self.admitted.exception() is None


@dataclass(slots=True)
class TenantQueue:
    """A tenant's slots in use, and its queued generations in order, by lane."""

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
