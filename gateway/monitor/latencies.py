"""Histogram of latencies, from which percentiles are computed.

The upper bound of each bucket is 5 % above its lower bound. Processes exchange histograms instead
of percentiles, because histograms of several processes can be added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

_LOG_WIDTH = math.log(1.05)
_MIN_MS = 0.1

Classes = Mapping[int, int]


class Latencies:
    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        number = round(math.log(max(seconds * 1000, _MIN_MS)) / _LOG_WIDTH)
        self.counts[number] = self.counts.get(number, 0) + 1


def join_counts(several: Iterable[Classes]) -> Classes:
    total: dict[int, int] = {}
    for classes in several:
        for number, count in classes.items():
            total[number] = total.get(number, 0) + count
    return total


def percentile_ms(classes: Classes, share: float) -> float | None:
    """Return a percentile of the latencies in milliseconds, accurate to 2.5 %.

    `classes` has the number of latencies in each bucket. `share` is the percentile as a fraction,
    such as 0.99. Return None if the histogram is empty.
    """
    wanted = share * sum(classes.values())
    seen = 0
    for number, count in sorted(classes.items()):
        seen += count
        if seen >= wanted:
            return round(math.exp(number * _LOG_WIDTH), 1)
    return None
