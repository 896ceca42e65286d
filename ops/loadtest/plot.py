"""A picture of latency against load, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ops.loadtest.report import stats
from ops.loadtest.sample import Mode, Run

_WIDTH, _HEIGHT = 760, 460
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 210, 50, 60
# Told apart by colour-blind eyes as well (Okabe and Ito's palette); a series also has its dashes.
_COLOURS: dict[Mode, str] = {"core": "#0072b2", "e2e": "#e69f00", "chat": "#009e73"}
_SERIES = {
    "P50 latency (ms)": ("P50 latency", ""),
    "P99 latency (ms)": ("P99 latency", "7 4"),
    "TTFT p50 (ms)": ("TTFT p50", "2 3"),
    "TTFT p99 (ms)": ("TTFT p99", "9 3 2 3"),
}


@dataclass(frozen=True)
class _Line:
    label: str
    colour: str
    dashes: str
    points: list[tuple[int, float]]


def latency_against_load(runs: Sequence[Run]) -> str:
    """Concurrency across, equally spaced by level; milliseconds up, on a logarithmic scale.

    A run without a limit stands at the number of its requests.
    """
    lines = _lines(runs)
    levels = sorted({x for line in lines for x, _ in line.points})
    values = [y for line in lines for _, y in line.points]
    ticks = _ticks(values)
    low, high = math.log10(ticks[0]), math.log10(ticks[-1])

    def x(level: int) -> float:
        share = levels.index(level) / (len(levels) - 1) if len(levels) > 1 else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        share = (math.log10(value) - low) / (high - low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        _text(_LEFT, 26, "Latency against load", size=16),
        _text((_LEFT + right) / 2, _HEIGHT - 16, "requests at a time", anchor="middle"),
        _text(_LEFT, _TOP - 8, "ms", anchor="end"),
    ]
    for tick in ticks:
        parts.append(f'<path d="M{_LEFT} {y(tick):.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, y(tick) + 4, f"{tick:g}", anchor="end"))
    parts += [_text(x(level), bottom + 20, str(level), anchor="middle") for level in levels]
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#333"/>')
    for number, line in enumerate(lines):
        points = " ".join(f"{x(level):.1f},{y(value):.1f}" for level, value in line.points)
        style = f'stroke="{line.colour}" stroke-width="2" stroke-dasharray="{line.dashes}"'
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
        parts += [
            f'<circle cx="{x(level):.1f}" cy="{y(value):.1f}" r="3" fill="{line.colour}"/>'
            for level, value in line.points
        ]
        at = _TOP + 10 + 20 * number
        parts.append(f'<path d="M{right + 20} {at}h36" {style}/>')
        parts.append(_text(right + 64, at + 4, line.label))
    return "\n".join([*parts, "</svg>", ""])


def _lines(runs: Sequence[Run]) -> list[_Line]:
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
                lines.append(_Line(f"{mode} {label}", _COLOURS[mode], dashes, sorted(points)))
    return lines


def _ticks(values: Sequence[float]) -> list[float]:
    """1, 2, 5, 10, 20, ... from below the least value to above the greatest; at least two."""
    low, high = min(values, default=1.0), max(values, default=10.0)
    ticks = [
        step * 10.0**power
        for power in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
        for step in (1, 2, 5)
    ]
    first = max(i for i, tick in enumerate(ticks) if tick <= low)
    last = min(i for i, tick in enumerate(ticks) if tick >= high)
    return ticks[first : max(last, first + 1) + 1]


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(text)}</text>"
