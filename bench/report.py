"""Report of a benchmark run as Markdown tables and JSON.

The module also replaces the generated part of bench/README.md with the Markdown of a run.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- begin: results -->", "<!-- end: results -->"

TITLES = {
    "tokens": "A token, scripted upstream",
    "triton": "A token, real Triton",
    "llmapi": "A token of the llmapi repository, by the answer's length",
    "requests": "A request of one token, 16 at a time",
    "protocols": "The same through each protocol, 16 at a time",
    "instructions": "Instructions, a request of one token and a token",
    "first_token": "Time to the first token, one request at a time",
    "beside": "First token beside streams of 50 tokens/s, in alternating windows",
    "levels": "Throughput by concurrency",
    "many": "1,024 streams below saturation",
    "memory": "Memory",
    "stall": "Event-loop stall: how long /health/live waits",
    "long": "Long prompts, one after the other, alone and beside 100 streams of 50 tokens/s",
    "cancel": "From the client's leaving to Triton, 100 other streams running",
    "workers": "Workers on one port",
    "limits": "Limits counted in Redis, in alternating windows with requests without limits",
    "lora": "Adapters",
    "litellm": "Beside LiteLLM",
    "peers": "Beside compiled gateways, window by window in turn",
    "prompts": "Prompts by their length and their words, beside SMG, in alternating windows",
    "overload": "More requests than can be served",
}


@dataclass
class Results:
    """Results of one run of the benchmark. `parts` has the table rows of each part that ran."""

    machine: dict[str, str]
    seconds_per_window: float
    pinned: str
    parts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def write_json(results: Results, path: Path) -> None:
    path.write_text(json.dumps(asdict(results), indent=2) + "\n")


def markdown(results: Results) -> str:
    """Return Markdown: the machine, the comparison with the targets, and a table for each part."""
    sections = [_machine(results)]
    if reached := _compare_targets(results):
        sections.append("### Reached\n\n" + table(reached))
    for part, rows in results.parts.items():
        if rows:
            sections.append(f"### {TITLES[part]}\n\n{table(rows)}")
    sections += [f"- {note}" for note in results.notes]
    return "\n\n".join(sections) + "\n"


def write_readme(results: Results) -> None:
    """Replace the text between the markers in bench/README.md."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"{README} has no lines {BEGIN} and {END}")
    README.write_text(f"{before}{BEGIN}\n{markdown(results)}{END}{after}", encoding="utf-8")


def table(rows: list[dict[str, Any]]) -> str:
    heads = list(rows[0])
    marks = ["---" if isinstance(rows[0][head], str) else "---:" for head in heads]
    lines = [heads, marks, *([_cell(row[head]) for head in heads] for row in rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _machine(results: Results) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    return f"Machine: {facts}. {results.pinned} Windows of {results.seconds_per_window:g} s."


def _compare_targets(results: Results) -> list[dict[str, Any]]:
    """Return a row for each performance target of the project, with the value of this run.

    Targets of parts that did not run are left out.
    """
    found: list[dict[str, Any]] = []

    def add(what: str, target: str, part: str, value: Any) -> None:
        if results.parts.get(part):
            found.append({"what": what, "target": target, "reached": value(results.parts[part])})

    def pick(rows: list[dict[str, Any]], column: str, **wanted: Any) -> float:
        for row in rows:
            if all(str(row[key]).startswith(str(value)) for key, value in wanted.items()):
                return float(row[column])
        return math.nan

    def ratio(rows: list[dict[str, Any]], column: str, other: str, **wanted: Any) -> float:
        theirs = pick(rows, column, who=other, **wanted)
        return pick(rows, column, who="gateway", **wanted) / theirs if theirs else math.nan

    cost, first = "CPU us/token", "prompt tokens"
    add(
        "CPU us/token, 100 trickling streams",
        "<= 25",
        "tokens",
        lambda rows: pick(rows, cost, who="gateway", pace="trickle"),
    )
    for other, target in (("tritonclient", "<= 1"), ("ordinary", "<= 0.45")):
        add(
            f"the same, of {other}'s",
            target,
            "tokens",
            lambda rows, other=other: ratio(rows, cost, other, pace="trickle"),
        )
    add(
        "CPU us/request of 1 token, short prompt",
        "<= 350 and tokenizing",
        "requests",
        lambda rows: pick(rows, "CPU us/request", who="gateway", **{first: 8}),
    )
    for size, row, target in (("64", 0, "<= 1.0"), ("750", 1, "<= 1.5")):
        add(
            f"added first token p50 ms, {size}-token prompt",
            target,
            "first_token",
            lambda rows, row=row: rows[row]["added p50 ms"],
        )
    for streams in (100, 500):
        add(
            f"first token p50 ms beside {streams} streams, more than alone",
            "<= 0.3",
            "beside",
            lambda rows, streams=streams: pick(
                rows, "more than alone", who="gateway", **{"other streams": streams}
            ),
        )
        add(
            f"CPU us/token, {streams} such streams, of SMG's",
            "<= 0.85",
            "beside",
            lambda rows, streams=streams: ratio(rows, cost, "SMG", **{"other streams": streams}),
        )
    add("MiB of a worker", "<= 150", "memory", lambda rows: rows[0]["after load MiB"])
    add("KiB of an idle stream", "<= 25", "memory", lambda rows: rows[0]["KiB per idle stream"])
    add(
        "added p99 gap ms, 1,024 streams of 10 tokens/s",
        "<= 20",
        "many",
        lambda rows: rows[0]["added gap p99 ms"],
    )
    add(
        "client leaves to stop request, p99 ms, worst kind",
        "<= 50",
        "cancel",
        lambda rows: max(row["stop p99 ms"] for row in rows),
    )
    add("cold adapter 132 MB, of a plain client's time", "<= 1.2", "lora", lambda r: r[3]["ratio"])
    add("stall ms while it is sent", "<= 20", "lora", lambda rows: rows[3]["stall ms"])
    add(
        "requests/core-s, of LiteLLM's",
        ">= 10",
        "litellm",
        lambda rows: ratio(rows, "requests/core-s", "LiteLLM"),
    )
    add(
        "added first token p50, of LiteLLM's",
        "<= 0.15",
        "litellm",
        lambda rows: ratio(rows, "added first token p50 ms", "LiteLLM"),
    )
    for what, target, column in (
        (
            "requests/s with limits and the most workers, of those without",
            ">= 0.85",
            "of those without",
        ),
        ("CPU of a request with limits, of one without", "<= 1.15", "of that without"),
        ("Redis us/request", "<= 25", "Redis us/request"),
        ("passed of 61 with 60 a minute", "60", "passed of 61"),
    ):
        add(what, target, "limits", lambda rows, column=column: rows[-1][column])
    add(
        "tokens/s with the most workers, of one's",
        ">= 7 of 8",
        "workers",
        lambda r: r[-1]["times one"],
    )
    return found
