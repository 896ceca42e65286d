"""What `admission` counts: places that are taken, and who waits for some, by tenant and lane."""

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
    """Places that `lanes` share, None for all lanes: as many may be taken by these together.

    Known by its `key`. `shared` are those of which a tenant has its share, where they are more:
    what requests of other lanes have of them now is no less for one tenant than for another.
    """

    places: int
    lanes: Collection[Lane] | None = None
    key: object = None
    shared: int = 0


Scopes = Callable[[Lane, Collection[Lane]], Sequence[Scope]]
"""The scopes in which a request of a lane needs its places, as long as there are these other
lanes."""


@dataclass(slots=True)
class Taken:
    """A number of places, and how many of them are of each lane but None."""

    total: int = 0
    lanes: dict[Lane, int] = field(default_factory=dict)

    def add(self, lane: Lane, more: int) -> None:
        self.total += more
        if lane is not None:
            self.lanes[lane] = self.lanes.get(lane, 0) + more
            if not self.lanes[lane]:
                del self.lanes[lane]

    def within(self, lanes: Collection[Lane] | None) -> int:
        if lanes is None:
            return self.total
        of_none = self.total - sum(self.lanes.values()) if None in lanes else 0
        return of_none + sum(count for lane, count in self.lanes.items() if lane in lanes)


@dataclass(eq=False, slots=True)
class Waiting:
    cost: int
    admitted: asyncio.Future[None]
    goes_on: bool = False
    """Whether it is of a request that has begun."""
    since: float = field(default_factory=time.monotonic)

    @property
    def is_admitted(self) -> bool:
        done = self.admitted.done() and not self.admitted.cancelled()
        return done and self.admitted.exception() is None


@dataclass(slots=True)
class TenantQueue:
    """One tenant: its places, and those that wait, in order: a line for each lane."""

    pace: Pace
    priority: int = 0
    taken: Taken = field(default_factory=Taken)
    lines: dict[Lane, deque[Waiting]] = field(default_factory=dict)

    @property
    def waiting(self) -> int:
        return sum(map(len, self.lines.values()))

    def waiting_in(self, lanes: Collection[Lane] | None) -> int:
        """As `Taken.within`."""
        if lanes is None:
            return self.waiting
        return sum([len(line) for lane, line in self.lines.items() if lane in lanes])
