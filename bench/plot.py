"""SVG plots of a run: tokens per second by concurrency, and the CPU time of a token."""

from __future__ import annotations

from typing import Any

from ops.loadtest.chart import COLOURS, Series, bars, graph, levels, logarithmic, svg


def draw(parts: dict[str, list[dict[str, Any]]]) -> str:
    """Return the plots as SVG. The SVG has no plots if neither `levels` nor `tokens` ran."""
    panels = []
    if rows := parts.get("levels"):
        column = next(name for name in rows[0] if name.startswith("tokens/s"))
        panels.append(_by_streams("tokens/s", rows, column))
        panels.append(_by_streams("requests/s", rows, "requests/s (1 token)"))
    if rows := parts.get("tokens"):
        costs = [(row["who"], row["CPU us/token"]) for row in rows if row["pace"] == "trickle"]
        panels.append(bars("CPU us/token, 100 trickling streams", costs))
    return svg(panels)


def _by_streams(unit: str, rows: list[dict[str, Any]], column: str) -> str:
    series: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row[column] > 0:
            series.setdefault(row["who"], []).append((row["streams"], row[column]))
    lines = [
        Series(who, COLOURS[n % len(COLOURS)], points)
        for n, (who, points) in enumerate(series.items())
    ]
    across = levels([x for line in lines for x, _ in line.points])
    up = logarithmic([y for line in lines for _, y in line.points])
    return graph(f"{unit} by streams", "streams", unit, lines, across, up)
