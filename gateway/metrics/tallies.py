"""Prometheus metrics without locks, for values that change with every request.

The metrics of prometheus_client take a lock for each change, because any thread may use them. The
locks took 5 % of the CPU time of a request. The metrics of this module must be used on one event
loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally:
    """Value of a counter or gauge for one set of labels."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, more: int = 1) -> None:
        self.value += more

    def dec(self) -> None:
        self.value -= 1


class Times:
    """Histogram of times in seconds, for one set of labels.

    `counts[i]` is the number of times that were at most `bounds[i]` but above `bounds[i - 1]`. The
    last item of `counts` is the number of times above all bounds.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self._bounds, seconds)] += 1
        self.total += seconds


T = TypeVar("T")


class _Labelled(Collector, Generic[T]):
    """Metric with one value for each set of labels. `make` creates a `Tally` or a `Times`."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        make: Callable[[], T],
        registry: CollectorRegistry,
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._make = make
        self._children: dict[tuple[str, ...], T] = {}
        registry.register(self)

    def labels(self, *values: str) -> T:
        found = self._children.get(values)
        if found is None:
            found = self._children[values] = self._make()
        return found


class Tallies(_Labelled[Tally]):
    """Counter metric with a `Tally` for each set of labels.

    Do not call `dec` of these tallies, because a Prometheus counter must not decrease.
    """

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry
    ) -> None:
        super().__init__(name, documentation, labels, Tally, registry)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, tally in self._children.items():
            family.add_metric(values, tally.value)
        yield family


class Level(Tally, Collector):
    """A gauge metric without labels."""

    def __init__(self, name: str, documentation: str, registry: CollectorRegistry) -> None:
        super().__init__()
        self._name = name
        self._documentation = documentation
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(self._name, self._documentation, self.value)


class Histograms(_Labelled[Times]):
    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        super().__init__(name, documentation, labels, lambda: Times(bounds), registry)
        self._bounds = [*map(floatToGoString, bounds), "+Inf"]

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        for values, times in self._children.items():
            buckets = [*zip(self._bounds, accumulate(times.counts), strict=True)]
            family.add_metric(values, buckets, times.total)
        yield family
