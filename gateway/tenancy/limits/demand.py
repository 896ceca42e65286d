"""Recent demand of a tenant's requests in this process for units of its limits.

A unit is a request, a token or a concurrent request. A process asks Redis for blocks of units in
advance. The demand of the last ticks (periods of equal length) gives the size of the next block.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

_RECENT_TICKS = 4
_MIN_REQUESTS = 4
"""Minimum number of recent requests for which a block is requested in advance.

A block is also at least large enough for this number of requests.
"""


class _Tick(NamedTuple):
    requests: int
    units: int
    rise: int


class UnitDemand:
    """Statistics of the units of one type that requests took and gave back in the last ticks."""

    __slots__ = ("_high", "_level", "_low", "_recent", "_requests", "_tick", "_units")

    def __init__(self) -> None:
        self._recent: deque[_Tick] = deque([_Tick(0, 0, 0)] * _RECENT_TICKS)
        self._level = self._low = self._high = 0
        self._requests = self._units = 0
        """Requests, and units that they took, in the recent ticks and the present tick."""
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
        """End the present tick, and begin the next one."""
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
        """Number of units to have in reserve for the next tick; 0 if requests are rare."""
        if self._requests < _MIN_REQUESTS:
            return 0
        rise = max([self._high - self._low, *[tick.rise for tick in self._recent]])
        return max(rise + rise // 4, self.floor)
