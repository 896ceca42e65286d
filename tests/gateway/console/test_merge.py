"""Merging the states of several workers: the refusals and troubles that operators see."""

from __future__ import annotations

from typing import Any

from gateway.console.merge import merge_parts
from gateway.console.part import Part
from gateway.monitor.demand import RECENT_S

LIMIT: dict[str, Any] = {"time": 1000.0, "why": "requests_per_minute"}


def _mistake(seconds_later: float) -> dict[str, Any]:
    return {"time": 1000.0 + seconds_later, "why": "model_not_found", "mistake": True}


def _part(refusal: dict[str, Any]) -> Part:
    tenant = {
        **dict.fromkeys(("running", "waiting", "requests_per_minute", "tokens_per_minute"), 0),
        "limits": {},
        "refused": {refusal["why"]: 1},
        "last_refusal": refusal,
    }
    empty = ("troubles", "replicas", "adapters", "requests", "ended")
    nothing: dict[str, Any] = {key: {} for key in empty}
    counts = dict.fromkeys(("waiting", "waiting_to_begin", "in_flight", "places"), 0)
    part: Part = {"gateway": {}, "tenants": {"acme": tenant}, "history": {}, **nothing, **counts}
    return part


def test_a_mistake_at_one_worker_does_not_hide_a_limit_at_another() -> None:
    for parts in ((LIMIT, _mistake(10)), (_mistake(10), LIMIT)):
        tenant = merge_parts([_part(refusal) for refusal in parts], 1020.0)["tenants"]["acme"]
        assert tenant["last_refusal"] == LIMIT
        assert tenant["refused"] == {"requests_per_minute": 1, "model_not_found": 1}


def test_one_long_after_it_is_told() -> None:
    late = _mistake(RECENT_S + 1)
    state = merge_parts([_part(LIMIT), _part(late)], late["time"])
    assert state["tenants"]["acme"]["last_refusal"] == late


def test_a_trouble_of_several_workers_is_one_and_none_is_lost() -> None:
    first, second, third = (_part(LIMIT) for _ in range(3))
    first["troubles"] = {"redis": {"level": "warning", "text": "away", "since": 20.0}}
    second["troubles"] = {
        "redis": {"level": "error", "text": "away", "since": 10.0},
        "models": {"level": "warning", "text": "unknown", "since": 5.0, "times": 2, "last": "x"},
    }
    third["troubles"] = {
        "models": {"level": "warning", "text": "unknown", "since": 7.0, "times": 3, "last": "y"},
    }
    assert merge_parts([first, second, third], 30.0)["troubles"] == {
        "redis": {"level": "error", "text": "away", "since": 10.0},
        "models": {"level": "warning", "text": "unknown", "since": 5.0, "times": 5, "last": "x"},
    }
