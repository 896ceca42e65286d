"""Estimate of how many units of its limits a tenant will use next in this process.

The units are requests, tokens and slots (concurrent requests). A process reserves a block of
several units in Redis before requests need them. This saves calls of Redis. Time is divided into
ticks of `lease.TICK_S` seconds. The units that requests took in the last ticks determine the size
of the next block.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_RECENT_TICKS = 4
_MIN_REQUESTS = 4
"""Minimum number of requests in the last ticks for which a process reserves a block of units.

Each block has enough units for at least this number of average requests.
"""


class _Tick(NamedTuple):
    requests: int
    units: int
    rise: int


class UnitDemand:
    """Statistics of the units that one tenant's requests took and gave back in the last ticks.

    Each instance counts one type of unit: requests, tokens or slots.
    """

    __slots__ = ("_high", "_level", "_low", "_recent", "_requests", "_tick", "_units")

    def __init__(self) -> None:
        self._recent: deque[_Tick] = deque([_Tick(0, 0, 0)] * _RECENT_TICKS)
        self._level = self._low = self._high = 0
        self._requests = self._units = 0
        """Number of requests in the last ticks and the present tick, and of units they took."""
        self._tick = 0, 0
        """Values of `_requests` and `_units` at the start of the present tick."""

    def take(self, units: int) -> None:
        self._requests += 1
        self._units += units
        self._level += units
        if self._level > self._high:  # noqa: PLR1730 - max() is four times as slow
            self._high = self._level

    def give_back(self, units: int) -> None:
        self._level -= units

    def roll(self) -> None:
        """End the present tick (a period of `lease.TICK_S` seconds), and begin the next tick."""
        requests, units = self._tick
        rise = self._high - self._low
        self._recent.append(_Tick(self._requests - requests, self._units - units, rise))
        oldest = self._recent.popleft()
        self._requests -= oldest.requests
        self._units -= oldest.units
        self._tick = self._requests, self._units
        self._low = self._high = self._level

    @property
    def floor(self) -> int:
        """Minimum size of a block: the number of units that four average requests take."""
        return _MIN_REQUESTS * max(1, -(-self._units // max(1, self._requests)))

    @property
    def wish(self) -> int:
        """Number of units that this process should reserve for the next tick.

        The number is 0 if requests are rare, so that reserving units would not save calls.
        """
        if self._requests < _MIN_REQUESTS:
            return 0
        rise = max([self._high - self._low, *[tick.rise for tick in self._recent]])
        return max(rise + rise // 4, self.floor)
