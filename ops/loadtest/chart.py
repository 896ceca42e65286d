"""Charts as SVG: line plots, bars, and panels in a row or column."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 200, 50, 60
# Colours by Okabe and Ito, which colour-blind readers can distinguish.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")


@dataclass(frozen=True)
class Series:
    """A line of a plot, which connects `points` in their order.

    `dashes` is an SVG stroke-dasharray; "" draws a solid line.
    """

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    dashes: str = ""


@dataclass(frozen=True)
class Scale:
    """An axis of a chart.

    `share` maps a value to its relative position on the axis: 0 at the start, 1 at the end.
    """

    ticks: Sequence[float]
    share: Callable[[float], float]


def levels(values: Sequence[float]) -> Scale:
    """Return a scale with a tick for each value. The ticks are equally spaced."""
    ticks = sorted(set(values))
    places = {tick: n / (len(ticks) - 1) if len(ticks) > 1 else 0.5 for n, tick in enumerate(ticks)}
    return Scale(ticks, places.__getitem__)


def linear(values: Sequence[float]) -> Scale:
    """Return a linear scale from 0 to the greatest value, with a tick at each quarter."""
    most = max(values, default=0.0) or 1.0
    return Scale([most * quarter / 4 for quarter in range(5)], lambda value: value / most)


def logarithmic(values: Sequence[float]) -> Scale:
    """Return a logarithmic scale that covers the values, with ticks at 1, 2, 5, 10, 20 and so on.

    The scale has at least two ticks. The values must be positive.
    """
    least, most = min(values, default=1.0), max(values, default=10.0)
    ticks = [
        step * 10.0**power
        for power in range(math.floor(math.log10(least)) - 1, math.ceil(math.log10(most)) + 2)
        for step in (1, 2, 5)
    ]
    first = max(i for i, tick in enumerate(ticks) if tick <= least)
    last = min(i for i, tick in enumerate(ticks) if tick >= most)
    ticks = ticks[first : max(last, first + 1) + 1]
    low, high = math.log10(ticks[0]), math.log10(ticks[-1])
    return Scale(ticks, lambda value: (math.log10(value) - low) / (high - low))


def graph(title: str, across: str, up: str, lines: Sequence[Series], x: Scale, y: Scale) -> str:
    """Return a line plot as SVG elements. `across` and `up` are the labels of the x and y axis."""
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def to_x(value: float) -> float:
        return _LEFT + x.share(value) * (right - _LEFT)

    def to_y(value: float) -> float:
        return bottom - y.share(value) * (bottom - _TOP)

    parts = [
        _text(_LEFT, 26, title, size=16),
        _text((_LEFT + right) / 2, _HEIGHT - 16, across, anchor="middle"),
        _text(_LEFT, _TOP - 8, up, anchor="end"),
    ]
    for tick in y.ticks:
        parts.append(f'<path d="M{_LEFT} {to_y(tick):.1f}H{right}" stroke="#ddd"/>')
        parts.append(_text(_LEFT - 8, to_y(tick) + 4, _number(tick), anchor="end"))
    parts += [_text(to_x(at), bottom + 20, _number(at), anchor="middle") for at in x.ticks]
    parts.append(f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#333"/>')
    for number, line in enumerate(lines):
        points = " ".join(f"{to_x(a):.1f},{to_y(b):.1f}" for a, b in line.points)
        style = f'stroke="{line.colour}" stroke-width="2" stroke-dasharray="{line.dashes}"'
        parts.append(f'<polyline points="{points}" fill="none" {style}/>')
        at = _TOP + 10 + 20 * number
        parts.append(f'<path d="M{right + 20} {at}h36" {style}/>')
        parts.append(_text(right + 64, at + 4, line.label))
    return "\n".join(parts)


def bars(title: str, values: Sequence[tuple[str, float]]) -> str:
    """Return a chart of horizontal bars as SVG elements, each bar with its name and value."""
    most = max(value for _, value in values) or 1.0
    parts = [_text(10, 26, title, size=16)]
    for number, (name, value) in enumerate(values):
        y = _TOP + number * 50
        length = (_WIDTH - 100) * value / most
        colour = COLOURS[number % len(COLOURS)]
        bar = f'<rect x="10" y="{y + 16}" width="{length:.1f}" height="20" fill="{colour}"/>'
        parts += [_text(10, y + 10, name), bar, _text(16 + length, y + 31, f"{value:.1f}")]
    return "\n".join(parts)


def svg(panels: Sequence[str], *, down: bool = False) -> str:
    """Return an SVG file with panels, from left to right or, if `down` is set, downwards."""
    step = (0, _HEIGHT) if down else (_WIDTH, 0)
    width, height = _WIDTH + step[0] * (len(panels) - 1), _HEIGHT + step[1] * (len(panels) - 1)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        place = f"translate({number * step[0]},{number * step[1]})"
        parts.append(f'<g transform="{place}">\n{panel}\n</g>')
    return "\n".join([*parts, "</svg>", ""])


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{escape(text)}</text>"
