"""What the parts of several workers become: the refusal that an operator should hear of."""

from __future__ import annotations

from typing import Any

from gateway.console.merge import merged
from gateway.console.part import Part
from gateway.monitor.demand import LATELY_S

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
    nothing: dict[str, Any] = {key: {} for key in ("replicas", "adapters", "requests", "ended")}
    counts = dict.fromkeys(("waiting", "in_flight", "places"), 0)
    part: Part = {"gateway": {}, "tenants": {"acme": tenant}, "history": {}, **nothing, **counts}
    return part


def test_a_mistake_at_one_worker_does_not_hide_a_limit_at_another() -> None:
    for parts in ((LIMIT, _mistake(10)), (_mistake(10), LIMIT)):
        tenant = merged([_part(refusal) for refusal in parts], 1020.0)["tenants"]["acme"]
        assert tenant["last_refusal"] == LIMIT
        assert tenant["refused"] == {"requests_per_minute": 1, "model_not_found": 1}


def test_one_long_after_it_is_told() -> None:
    late = _mistake(LATELY_S + 1)
    state = merged([_part(LIMIT), _part(late)], late["time"])
    assert state["tenants"]["acme"]["last_refusal"] == late
