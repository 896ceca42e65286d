"""Merging of the data of all workers ("parts") into the data that the console shows.

Counts of the workers are added. If workers report different states of a replica, the merged data
have the worst state.

The console receives changes as JSON merge patches. Such a patch cannot change single items of a
list, and null removes a member. The merged data therefore have objects instead of lists, and omit
unknown values instead of setting them to null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.console import replicas, tenants
from gateway.console.part import Part
from gateway.monitor.demand import RECENT_S
from gateway.monitor.history import STEP_S, STEPS
from gateway.monitor.latencies import join_counts, percentile_ms

_MAX_ENDED = 100
_BY_STATE = {state: place for place, state in enumerate(replicas.WORST_FIRST)}
_LEVELS = ("warning", "error", "critical")
_CELLS = {"held": 0, "loading": 1, "lacking": 2, "cold": 3}

Facts = dict[str, Any]


def merge_parts(parts: Sequence[Part], now: float) -> Facts:
    """Return the data for the console, merged from one `Part` per worker of this gateway.

    The first part must have been made with `complete=True`. The parts are modified. `now` is the
    present time in seconds since 1970.
    """
    first, *others = parts
    state: Facts = {"time": now, "gateway": first["gateway"] | {"answering": len(parts)}}
    for name in ("waiting", "waiting_to_begin", "in_flight", "places"):
        state[name] = sum([part[name] for part in parts])
    for other in others:
        _join(first["replicas"], other["replicas"], _join_replica)
        _join(first["adapters"], other["adapters"], _join_adapter)
        _join(first["tenants"], other["tenants"], _join_tenant)
        _add_troubles(first["troubles"], other["troubles"])
        first["requests"] |= other["requests"]
        first["ended"] |= other["ended"]
        if "left_out" in other:
            first["left_out"] = _add_counts(first.get("left_out", {}), other["left_out"])
    for name in ("troubles", "replicas", "adapters", "tenants", "requests"):
        state[name] = first[name]
    last = sorted(first["ended"].items(), key=lambda item: item[1]["ended"])[-_MAX_ENDED:]
    state["ended"] = dict(last)
    state["history"] = {
        "step": STEP_S,
        "points": _merge_points([part["history"] for part in parts]),
    }
    if "left_out" in first:
        state["left_out"] = first["left_out"]
    return state


def _join(into: Facts, more: Facts, join: Any) -> None:
    for name, facts in more.items():
        if name in into:
            join(into[name], facts)


def _add_troubles(into: Facts, more: Facts) -> None:
    """Add the troubles (current problems) of another worker to `into`.

    If several workers have the same trouble, use the worst level and the earliest time, and add the
    numbers of occurrences.
    """
    for name, facts in more.items():
        own: Facts | None = into.get(name)
        if own is None:
            into[name] = facts
            continue
        own["level"] = max(own["level"], facts["level"], key=_LEVELS.index)
        own["since"] = min(own["since"], facts["since"])
        if "times" in facts:
            own["times"] = own.get("times", 0) + facts["times"]


def _join_replica(own: Facts, other: Facts) -> None:
    for name in replicas.SUMMED_FIELDS:
        if name in other:
            own[name] = own.get(name, 0) + other[name]
    if _BY_STATE[other["state"]] < _BY_STATE[own["state"]]:
        own["state"] = other["state"]
        if "why" in other:
            own["why"] = other["why"]
    failures = [each["last_failure"] for each in (own, other) if "last_failure" in each]
    if failures:
        own["last_failure"] = max(failures, key=lambda failure: failure["time"])


def _join_adapter(own: Facts, other: Facts) -> None:
    if "requests_per_minute" in other:
        rate = own.get("requests_per_minute", 0.0) + other["requests_per_minute"]
        own["requests_per_minute"] = round(rate, 1)
    cells = own["replicas"]
    for endpoint, cell in other.get("replicas", {}).items():
        known = cells.setdefault(endpoint, cell)
        if known is cell:
            continue
        if _CELLS[cell["state"]] < _CELLS[known["state"]]:
            known["state"] = cell["state"]
        if "evicted" in cell:
            known["evicted"] = known.get("evicted", 0) + cell["evicted"]


def _join_tenant(own: Facts, other: Facts) -> None:
    for name in tenants.SUMMED_FIELDS:
        own[name] = round(own[name] + other[name], 1)
    if "refused" in other:
        own["refused"] = _add_counts(own.get("refused", {}), other["refused"])
        last = [each["last_refusal"] for each in (own, other) if "last_refusal" in each]
        own["last_refusal"] = _pick_last_refusal(*last)
    for name, limit in other["limits"].items():
        if (known := own["limits"].get(name)) is None:
            continue
        # Each worker counts only its own concurrent requests, so add the numbers. Workers share the
        # counters of all other limits, but may have read them at different times: use the highest
        # value.
        used = (known["used"], limit["used"])
        known["used"] = sum(used) if name == "concurrent_requests" else max(used)


def _pick_last_refusal(*of: Facts) -> Facts:
    """Return the refused request that the console shows for a tenant.

    `of` has the last refused request of one or two workers. Return the request that was refused
    last, with one exception: if this request was invalid, but a valid request was refused less than
    `RECENT_S` seconds before, return the valid request.
    """
    last = max(of, key=lambda refusal: refusal["time"])
    others = [refusal for refusal in of if "mistake" not in refusal]
    if "mistake" in last and others and last["time"] - others[0]["time"] < RECENT_S:
        return others[0]
    return last


def _add_counts(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}


def _merge_points(histories: Sequence[dict[str, Facts]]) -> dict[str, Facts]:
    times = sorted({int(at) for history in histories for at in history})[-STEPS:]
    points: dict[str, Facts] = {}
    for at in map(str, times):
        own = [history[at] for history in histories if at in history]
        names = ("tokens", "requests", "errors", "cold_sends", "queue")
        point: Facts = {name: sum([each[name] for each in own]) for name in names}
        classes = join_counts(
            {int(number): count for number, count in each.get("first_tokens", {}).items()}
            for each in own
        )
        for name, share in (("ttft_p50_ms", 0.5), ("ttft_p99_ms", 0.99)):
            if (value := percentile_ms(classes, share)) is not None:
                point[name] = value
        points[at] = point
    return points
