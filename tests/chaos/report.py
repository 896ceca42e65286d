"""Results of a chaos run: the table, and the broken promises."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import checks
from tests.chaos.checks import Bills
from tests.chaos.clients import ObservedRequest
from tests.chaos.footprint import Footprint
from tests.chaos.world import REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE, World

# Growth limits of a worker. Other processes are not limited, as engines fill their caches.
_GROWN_RSS, _GROWN_FILES = 48 << 20, 24
_PLAIN = ("right", "wrong", "hung", "left", "cut", "no connection")


@dataclass
class Report:
    """Rows of the table by section, and the broken promises in words."""

    sections: dict[str, dict[str, str]]
    broken: list[str]

    def text(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        for section, rows in self.sections.items():
            yield f"\n| {section} | |"
            yield "|---|---|"
            yield from (f"| {name} | {value} |" for name, value in rows.items())
        yield ""
        yield from (f"BROKEN: {sentence}" for sentence in self.broken)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "chaos.md").write_text(self.text(), encoding="utf-8")
        found = json.dumps(dataclasses.asdict(self), ensure_ascii=False, indent=1)
        (folder / "chaos.json").write_text(found, encoding="utf-8")


def report(
    world: World,
    calm: Sequence[ObservedRequest],
    chaos: Sequence[ObservedRequest],
    before: Mapping[str, Footprint],
    after: Mapping[str, Footprint],
) -> Report:
    every = [*calm, *chaos]
    outcomes = Counter(seen.outcome for seen in every)
    unexplained = [
        seen
        for seen in every
        if seen.outcome in ("cut", "no connection")
        and not seen.gateway.was_out(seen.started, seen.ended)
    ]
    bills = {gateway.name: checks.check_bills(gateway, every) for gateway in world.gateways}
    counted = {gateway.name: gateway.lost_lines for gateway in world.gateways}
    requests, tokens = checks.peak_per_minute(world, every)
    requests_row = {"requests": len(every), **{name: outcomes[name] for name in _PLAIN}}
    requests_row["cut or refused by a gateway that nobody had killed"] = len(unexplained)
    broken = [
        *world.broken,
        *(sentence for found in bills.values() for sentence in found.wrong),
        *_broken_outcomes(every, unexplained),
        *_broken_bills(bills, counted),
        *_grown(before["worker"], after["worker"]),
    ]
    if checks.limits_exceeded(requests, tokens):
        broken.append(f"{requests} requests, {tokens} tokens of the tight tenant in 60 s")
    if world.done["use many adapters"] and not world.evictions:
        broken.append("no engine had to forget an adapter, so nothing is known of that")
    sections = {
        "requests": _format_counts(requests_row),
        "errors": _format_counts({n: c for n, c in sorted(outcomes.items()) if n not in _PLAIN}),
        "seconds of right answers": {"calm": _times(calm), "chaos": _times(chaos)},
        "usage lines": _format_counts(
            {
                "written": sum(found.lines for found in bills.values()),
                "lost": sum(found.missing for found in bills.values()),
                "counted as lost, on a full disk": sum(counted.values()),
                "doubled": sum(found.doubled for found in bills.values()),
            }
        ),
        "most of the tight tenant in 60 s": {
            "requests": f"{requests} of {REQUESTS_PER_MINUTE}",
            "tokens": f"{tokens} of {TOKENS_PER_MINUTE}",
        },
        "largest process, MiB and files": {
            kind: f"{_size(before[kind])} -> {_size(after[kind])}" for kind in before
        },
        "by themselves": {
            "Tritons that aborted, and were started again": f"{world.aborts:,}",
            "adapters sent again after an eviction, at least": f"{world.evictions:,}",
        },
        "acts": {**_format_counts(dict(sorted(world.done.items()))), **world.skipped},
    }
    return Report(sections, broken)


def _broken_outcomes(
    every: Sequence[ObservedRequest], unexplained: Sequence[ObservedRequest]
) -> Iterator[str]:
    for seen in every:
        if seen.outcome == "hung":
            yield f"{seen.request_id} was not answered in {seen.took_s:.0f} s"
    for seen in unexplained:
        yield f"{seen.request_id}: {seen.outcome} at {seen.gateway.name}, which nobody had killed"
    right = sum(seen.outcome == "right" for seen in every)
    if 2 * right < len(every):
        yield f"only {right} of {len(every)} requests were answered"


def _broken_bills(bills: Mapping[str, Bills], counted: Mapping[str, int]) -> Iterator[str]:
    for name, found in bills.items():
        if found.missing > counted[name]:
            yield f"{found.missing} usage lines of {name} are lost, {counted[name]} counted so"
        if found.doubled:
            yield f"{found.doubled} usage lines of {name} are doubled"


def _grown(before: Footprint, after: Footprint) -> Iterator[str]:
    if after.rss > before.rss + _GROWN_RSS or after.files > before.files + _GROWN_FILES:
        yield f"a worker has grown: {_size(before)} -> {_size(after)}"


def _format_counts(counts: Mapping[str, int]) -> dict[str, str]:
    return {name: f"{count:,}" for name, count in counts.items()}


def _times(seen: Sequence[ObservedRequest]) -> str:
    times = sorted(each.took_s for each in seen if each.outcome == "right")
    if not times:
        return "none"
    p50, p99 = (times[math.ceil(len(times) * share) - 1] for share in (0.5, 0.99))
    return f"p50 {p50:.2f}, p99 {p99:.2f}"


def _size(footprint: Footprint) -> str:
    return f"{footprint.rss / 2**20:.0f} MiB, {footprint.files}"
