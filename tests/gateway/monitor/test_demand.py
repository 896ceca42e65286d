"""Requests and tokens of each tenant in the last minute."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gateway.monitor import demand
from gateway.monitor.demand import RECENT_S, TenantDemand

STEP_S = 10.0


@pytest.fixture
def pass_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that advances the clock by a number of seconds."""
    now = 1000.0

    def go_on(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(demand.time, "monotonic", lambda: now)
    monkeypatch.setattr(demand.time, "time", lambda: 1_795_213_205.0 + now)
    return go_on


def _minute(of: TenantDemand, pass_s: Callable[[float], None], *, asked: bool) -> None:
    """Pass six steps. If `asked`, each has 5 requests of 20 tokens, two of them for an adapter."""
    for _ in range(6):
        if asked:
            of.requests["a"] += 5
            of.tokens["a"] += 100
            of.adapter_requests["zh"] += 2
        pass_s(STEP_S)
        of.step()


def test_the_first_seconds_are_not_taken_for_a_minute(pass_s: Callable[[float], None]) -> None:
    """Ten requests at the start count as ten a minute. Tenants without requests are omitted."""
    asked = TenantDemand()
    asked.requests["quiet"] = 0
    pass_s(STEP_S)
    asked.requests["a"] += 10
    assert asked.per_minute() == ({"a": 10.0}, {}, {})


def test_a_minute_is_the_last_one(pass_s: Callable[[float], None]) -> None:
    asked = TenantDemand()
    for _ in range(3):
        _minute(asked, pass_s, asked=True)
        assert asked.per_minute() == ({"a": 30.0}, {"a": 600.0}, {"zh": 12.0})
    _minute(asked, pass_s, asked=False)
    assert asked.per_minute() == ({}, {}, {})
    assert asked.requests == {"a": 90}


def test_steps_that_came_late_make_it_no_more(pass_s: Callable[[float], None]) -> None:
    """If a step comes after two minutes, half of the requests count for the last minute."""
    asked = TenantDemand()
    asked.requests["a"] += 30
    pass_s(120)
    assert asked.per_minute()[0] == {"a": 15.0}


def test_only_what_a_minute_needs_is_kept(pass_s: Callable[[float], None]) -> None:
    asked = TenantDemand()
    for _ in range(20):
        _minute(asked, pass_s, asked=True)
    assert len(asked._snapshots) == 7


def test_a_refusal_is_told_until_it_is_old(pass_s: Callable[[float], None]) -> None:
    asked = TenantDemand()
    asked.count_refusal("a", "queue_full")
    pass_s(RECENT_S - 1)
    asked.count_refusal("a", "model_not_found", mistake=True)
    assert asked.refusals["a"].why == "queue_full"
    pass_s(1)
    asked.count_refusal("a", "model_not_found", mistake=True)
    assert (asked.refusals["a"].why, asked.refusals["a"].mistake) == ("model_not_found", True)


def test_a_later_mistake_takes_the_place_of_one(pass_s: Callable[[float], None]) -> None:
    asked = TenantDemand()
    asked.count_refusal("a", "model_not_found", mistake=True)
    pass_s(1)
    asked.count_refusal("a", "bad_parameter", mistake=True)
    assert asked.refusals["a"].why == "bad_parameter"
