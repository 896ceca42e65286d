"""The plot of a run: tokens per second by concurrency, and the CPU that a token costs, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 420, 300, 60, 40, 40
_COLOURS = ("#1565c0", "#c62828", "#6a6a6a", "#2e7d32")
Series = dict[str, list[tuple[float, float]]]


def svg(parts: dict[str, list[dict[str, Any]]]) -> str:
    """A drawing of what ran; an empty one when neither `levels` nor `tokens` did."""
    panels = []
    if rows := parts.get("levels"):
        column = next(name for name in rows[0] if name.startswith("tokens/s"))
        for head, title in (
            (column, "tokens/s by streams"),
            ("requests/s (1 token)", "requests/s by streams"),
        ):
            panels.append(_lines(title, _series(rows, head)))
    if rows := parts.get("tokens"):
        costs = [(row["who"], row["CPU us/token"]) for row in rows if row["pace"] == "trickle"]
        panels.append(_bars("CPU us/token, 100 trickling streams", costs))
    body = "".join(
        f'<g transform="translate({n * _WIDTH},0)">{panel}</g>' for n, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH * len(panels)}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )


def _series(rows: list[dict[str, Any]], head: str) -> Series:
    series: Series = {}
    for row in rows:
        series.setdefault(row["who"], []).append((row["streams"], row[head]))
    return series


def _text(x: float, y: float, text: str, **more: str) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{attributes}>{escape(text)}</text>'


def _lines(title: str, series: Series) -> str:
    """Both axes are logarithmic."""
    points = [point for line in series.values() for point in line if point[1] > 0]
    x0, x1 = (math.log10(edge(x for x, _ in points)) for edge in (min, max))
    y0 = math.floor(math.log10(min(y for _, y in points)))
    y1 = math.ceil(math.log10(max(y for _, y in points)))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - x0) / ((x1 - x0) or 1)
        up = (math.log10(y) - y0) / ((y1 - y0) or 1)
        return (
            _LEFT + across * (_WIDTH - _LEFT - 20),
            _HEIGHT - _BOTTOM - up * (_HEIGHT - _BOTTOM - _TOP),
        )

    def parts() -> Iterator[str]:
        yield _text(_LEFT, 18, title, font_weight="bold")
        for power in range(y0, y1 + 1):
            x, y = place(10**x0, 10**power)
            yield f'<path d="M{x:.1f} {y:.1f}H{_WIDTH - 20}" stroke="#dddddd"/>'
            yield _text(x - 5, y + 4, f"{10**power:,}", text_anchor="end")
        for x_value in sorted({x for x, _ in points}):
            x, _ = place(x_value, 10**y0)
            yield _text(x, _HEIGHT - _BOTTOM + 16, f"{x_value:,.0f}", text_anchor="middle")
        for n, (name, line) in enumerate(series.items()):
            colour = _COLOURS[n % len(_COLOURS)]
            path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in line if y > 0)
            yield f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
            yield _text(_LEFT + 130 * n, 33, name, fill=colour)

    return "".join(parts())


def _bars(title: str, values: Sequence[tuple[str, float]]) -> str:
    most = max(value for _, value in values)
    parts = [_text(10, 18, title, font_weight="bold")]
    for n, (name, value) in enumerate(values):
        y = _TOP + n * 55
        length = (_WIDTH - 80) * value / most
        parts.append(_text(10, y + 10, name))
        colour = _COLOURS[n % len(_COLOURS)]
        parts.append(
            f'<rect x="10" y="{y + 16}" width="{length:.1f}" height="20" fill="{colour}"/>'
        )
        parts.append(_text(16 + length, y + 31, f"{value:.1f}"))
    return "".join(parts)
