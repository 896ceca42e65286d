"""Plot of latency against load, as SVG."""

from __future__ import annotations

from collections.abc import Sequence

from ops.loadtest.chart import COLOURS, Series, graph, levels, logarithmic, svg
from ops.loadtest.report import stats
from ops.loadtest.sample import BenchRun, Mode

_COLOURS: dict[Mode, str] = {"core": COLOURS[0], "e2e": COLOURS[1], "chat": COLOURS[2]}
_SERIES = {
    "P50 latency (ms)": ("P50 latency", ""),
    "P99 latency (ms)": ("P99 latency", "7 4"),
    "TTFT p50 (ms)": ("TTFT p50", "2 3"),
    "TTFT p99 (ms)": ("TTFT p99", "9 3 2 3"),
}


def latency_against_load(runs: Sequence[BenchRun]) -> str:
    """Return an SVG plot of latency in milliseconds (logarithmic) against concurrency.

    The measured concurrencies are equally spaced. The concurrency of a run without limit is its
    number of requests.
    """
    lines = _build_series(runs)
    across = levels([x for line in lines for x, _ in line.points])
    up = logarithmic([y for line in lines for _, y in line.points])
    return svg([graph("Latency against load", "requests at a time", "ms", lines, across, up)])


def _build_series(runs: Sequence[BenchRun]) -> list[Series]:
    tables = [(run, stats(run)) for run in runs]
    lines = []
    for mode in dict.fromkeys(run.mode for run in runs):
        for name, (label, dashes) in _SERIES.items():
            points = [
                (run.concurrency or len(run.samples), table[name])
                for run, table in tables
                if run.mode == mode and table.get(name, 0.0) > 0
            ]
            if points:
                lines.append(Series(f"{mode} {label}", _COLOURS[mode], sorted(points), dashes))
    return lines
