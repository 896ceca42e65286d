"""Early stops of a request: reported once, after all have ended, with the slowest one's time."""

from __future__ import annotations

import time

import pytest

from gateway.metrics.metrics import Metrics
from gateway.stops import EarlyStop, Stops


def test_a_request_is_told_of_when_its_last_choice_is_let_go() -> None:
    told: list[Stops] = []
    stops = Stops(told.append)
    began = time.perf_counter() - 1
    slow, quick = stops.begin("disconnect", began), stops.begin("disconnect")
    assert stops.open == 2
    quick.end(freed=True)
    assert told == []
    slow.end(freed=True)
    slow.end(freed=True)
    assert told == [stops]
    assert stops.open == 0
    facts = stops.facts()
    assert facts["stop"] == "disconnect"
    assert isinstance(stop_ms := facts["stop_ms"], float)
    assert 1000 <= stop_ms < 60_000


def test_where_one_end_was_not_seen_no_time_is_told() -> None:
    stops = Stops(lambda _: None)
    seen, unseen = stops.begin("timeout"), stops.begin("timeout")
    seen.end(freed=True)
    unseen.end(freed=False)
    assert stops.facts() == {"stop": "timeout"}
    assert unseen.seconds is None


def test_who_asks_late_is_told_at_once() -> None:
    stopping = EarlyStop("cancelled")
    stopping.end(freed=True)
    told: list[EarlyStop] = []
    stopping.add_listener(told.append)
    assert told == [stopping]


@pytest.mark.parametrize("freed", [True, False])
def test_each_is_in_one_metric(freed: bool) -> None:
    metrics = Metrics()
    stopping = EarlyStop("disconnect")
    metrics.count_stop(stopping)
    value = metrics.registry.get_sample_value
    labels = {"reason": "disconnect"}
    assert value("gateway_stop_seconds_count", labels) is None
    stopping.end(freed)
    assert value("gateway_stops_total", labels) == 1
    assert value("gateway_stop_seconds_count", labels) == (1 if freed else None)
    assert value("gateway_stops_unseen_total", labels) == (None if freed else 1)
