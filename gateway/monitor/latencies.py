"""Histogram of latencies, from which percentiles are computed. Its buckets are 5 % wide.

Histograms of several processes can be added; percentiles could not.
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

    `share` is the percentile as a fraction, such as 0.99. Return None if there are no latencies.
    """
    wanted = share * sum(classes.values())
    seen = 0
    for number, count in sorted(classes.items()):
        seen += count
        if seen >= wanted:
            return round(math.exp(number * _LOG_WIDTH), 1)
    return None
