"""Reports of `gateway bench`, as text, CSV or JSON.

A report has the statistics of NVIDIA's benchmark_core_model.py, the time to the first token, and
the time between tokens.
"""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ops.loadtest.sample import BenchRun, percentile

_PARTS = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
# Statistics that benchmark_core_model.py names differently in its table (the keys here) and in its
# CSV file (the values).
_CSV_NAMES = {
    "Avg. IP tokens per request": "Avg. Input tokens per request",
    "Avg. OP tokens per request": "Avg. Output tokens per request",
}

Stats = Mapping[str, float]


def stats(run: BenchRun) -> Stats:
    """Return the run's statistics by name; nan if nothing was measured.

    The statistics of benchmark_core_model.py come first, then those of this project. Failed
    requests are not included in times and rates. "Avg. InFlight requests" is the sum of the
    latencies divided by the duration of the run.
    """
    good, seconds = run.good, run.seconds
    latencies = [1000 * sample.latency for sample in good]
    tokens = sum(sample.output_tokens for sample in good)
    found = {
        "Requests/Sec": _ratio(len(good), seconds),
        "OP tokens/sec": _ratio(tokens, seconds),
        "Avg. latency (ms)": _ratio(sum(latencies), len(good)),
        "P99 latency (ms)": percentile(latencies, 0.99),
        "P90 latency (ms)": percentile(latencies, 0.90),
        "Avg. IP tokens per request": _ratio(sum(s.input_tokens for s in good), len(good)),
        "Avg. OP tokens per request": _ratio(tokens, len(good)),
        "Avg. InFlight requests": _ratio(sum(latencies), 1000 * seconds),
        "Total latency (ms)": 1000 * seconds,
        "Total requests": float(len(run.samples)),
        "Failed requests": float(run.failed),
        "P50 latency (ms)": percentile(latencies, 0.50),
    }
    first = [1000 * s.first_token for s in good if s.first_token is not None]
    between = [1000 * s.between_tokens for s in good if s.between_tokens is not None]
    for name, values in (("TTFT", first), ("Inter-token latency", between)):
        if values:
            for part, where in _PARTS.items():
                found[f"{name} {part} (ms)"] = percentile(values, where)
    return found


def text(runs: Sequence[BenchRun]) -> str:
    """Return the report as text, with a table for each concurrency.

    A table has a column for each mode. If there are several modes, a further column has the
    differences: the value of the last mode minus the value of the first mode.
    """
    blocks = ["\n".join(dict.fromkeys(f"{run.mode}: {run.what}" for run in runs))]
    for level in dict.fromkeys(run.concurrency for run in runs):
        beside = [run for run in runs if run.concurrency == level]
        heads: list[str] = ["Value"] if len(beside) == 1 else [run.mode for run in beside]
        columns = [stats(run) for run in beside]
        if len(beside) > 1:
            heads.append(f"{beside[-1].mode} - {beside[0].mode}")
            columns.append(_difference(columns[0], columns[-1]))
        rows = [
            [name, *(_cell(name, column.get(name, math.nan)) for column in columns)]
            for name in dict.fromkeys(name for column in columns for name in column)
        ]
        title = [] if level is None else [f"{level} at a time:"]
        blocks.append("\n".join([*title, _grid([["Stat", *heads], *rows])]))
    for run in runs:
        errors = Counter(sample.error for sample in run.samples if sample.error)
        for error, count in errors.most_common(5):
            blocks.append(f"{run.mode}: {count} requests failed: {error}")
    return "\n\n".join(blocks)


def write_stats_csv(runs: Sequence[BenchRun], file: Path) -> None:
    """Write a CSV file with a line for each run.

    The columns of benchmark_core_model.py come first.
    """
    tables = [stats(run) for run in runs]
    names = list(dict.fromkeys(name for table in tables for name in table))
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow([*(_CSV_NAMES.get(name, name) for name in names), "Mode", "Concurrency"])
        for run, table in zip(runs, tables, strict=True):
            cells = [_cell(name, table.get(name, math.nan)) for name in names]
            writer.writerow([*cells, run.mode, run.concurrency or ""])


def write_requests_csv(runs: Sequence[BenchRun], file: Path) -> None:
    """Write a CSV file with a line for each request. Times are in milliseconds.

    `start_ms` is relative to the start of the run.
    """
    with file.open("w", encoding="utf-8", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow(
            (
                "mode",
                "concurrency",
                "request",
                "start_ms",
                "latency_ms",
                "ttft_ms",
                "inter_token_ms",
                "input_tokens",
                "output_tokens",
                "error",
            )
        )
        for run in runs:
            for s in run.samples:
                times = (s.began, s.latency, s.first_token, s.between_tokens)
                cells = ["" if t is None else f"{1000 * t:.3f}" for t in times]
                counts = (s.input_tokens, s.output_tokens)
                who = (run.mode, run.concurrency or "", s.number)
                writer.writerow((*who, *cells, *counts, s.error))


def write_json(runs: Sequence[BenchRun], file: Path) -> None:
    """Write a JSON list with an object for each run.

    `samples` has the fields of `ops.loadtest.sample.Sample`, with times in seconds.
    """
    found = [
        {
            "mode": run.mode,
            "what": run.what,
            "concurrency": run.concurrency,
            "stats": {n: None if math.isnan(v) else v for n, v in stats(run).items()},
            "samples": [asdict(sample) for sample in run.samples],
        }
        for run in runs
    ]
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _ratio(whole: float, parts: float) -> float:
    return whole / parts if parts else math.nan


def _difference(first: Stats, last: Stats) -> Stats:
    return {name: last[name] - first[name] for name in first if name in last}


def _cell(name: str, value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:.0f}" if name.endswith(" requests") and "Avg" not in name else f"{value:.2f}"


def _grid(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    rule = "+".join(["", *("-" * (width + 2) for width in widths), ""])
    lines = [
        "| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |"
        for row in rows
    ]
    return "\n".join([rule, lines[0], rule, *lines[1:], rule])
