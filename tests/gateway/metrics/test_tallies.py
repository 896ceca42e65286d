"""Metrics counted without locks are exported exactly like those of prometheus_client."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gateway.metrics.tallies import Histograms, Level, Tallies

BOUNDS = (0.1, 0.25, 1, 30)
# Seconds on a bound, below the first, between two bounds, and above the last.
SECONDS = (0.1, 0.05, 0.2, 0.25, 0.3, 30, 31.5)


def _exported(registry: CollectorRegistry) -> list[str]:
    """Return the exported lines without `_created` times, which only prometheus_client writes."""
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]


def test_counters() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tallies = Tallies("asked_total", "How often.", ["model", "status"], ours)
    counter = Counter("asked_total", "How often.", ["model", "status"], registry=theirs)
    for labels, more in ((("a", "200"), 1), (("a", "503"), 2), (("a", "200"), 40), (("b", "1"), 0)):
        tallies.labels(*labels).inc(more)
        counter.labels(*labels).inc(more)
    assert _exported(ours) == _exported(theirs)
    assert 'asked_total{model="a",status="200"} 41.0' in _exported(ours)


def test_a_level_goes_up_and_down() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    level = Level("under_way", "How many.", ours)
    gauge = Gauge("under_way", "How many.", registry=theirs)
    for each in (level, gauge):
        each.inc()
        each.inc(3)
        each.dec()
    assert _exported(ours) == _exported(theirs)
    assert "under_way 3.0" in _exported(ours)


def test_histograms_count_a_time_on_a_bound_below_it() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    histograms = Histograms("took_seconds", "How long.", ["model"], BOUNDS, ours)
    histogram = Histogram("took_seconds", "How long.", ["model"], buckets=BOUNDS, registry=theirs)
    for seconds in SECONDS:
        histograms.labels("a").observe(seconds)
        histogram.labels("a").observe(seconds)
    histograms.labels("never")
    histogram.labels("never")
    assert _exported(ours) == _exported(theirs)
    assert 'took_seconds_bucket{le="0.1",model="a"} 2.0' in _exported(ours)


def test_a_metric_has_one_child_for_each_set_of_labels() -> None:
    tallies = Tallies("asked_total", "How often.", ["model"], CollectorRegistry())
    assert tallies.labels("a") is tallies.labels("a")
    assert tallies.labels("a") is not tallies.labels("b")
