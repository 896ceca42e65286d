"""History of the last hour: its steps, its bounded length, and percentiles of several processes."""

from __future__ import annotations

from gateway.monitor.history import STEP_S, STEPS, RecentHistory, until_step_ends
from gateway.monitor.latencies import Latencies, join_counts, percentile_ms

NOW = 1_795_213_205.0


def test_a_step_has_what_came_since_the_last_one() -> None:
    history = RecentHistory()
    history.totals.requests, history.totals.tokens = 3, 40
    history.step(NOW, running_tokens=2, uploads=1, queue=5)
    history.totals.requests, history.totals.errors, history.totals.tokens = 4, 1, 50
    history.step(NOW + STEP_S, running_tokens=0, uploads=1, queue=0)
    first, second = history.points
    assert (first.requests, first.errors, first.tokens, first.uploads) == (3, 0, 42, 1)
    assert (second.requests, second.errors, second.tokens, second.uploads) == (1, 1, 8, 0)
    assert (first.queue, second.queue) == (5, 0)
    assert first.at % STEP_S == 0
    assert second.at - first.at == STEP_S


def test_a_sleep_that_ends_a_moment_early_leaves_no_gap() -> None:
    history = RecentHistory()
    for now in (NOW + 5, NOW + 14.9999, NOW + 25.0001):
        history.step(now, running_tokens=0, uploads=0, queue=0)
    begun = [point.at for point in history.points]
    assert begun == [NOW - 5, NOW + 5, NOW + 15]
    # Both moments wait for the same end of a step, so no step is recorded twice.
    for now in (NOW + 14.9999, NOW + 15.0001):
        assert now + until_step_ends(now) == NOW + 25


def test_a_replica_that_leaves_takes_nothing_from_a_step() -> None:
    history = RecentHistory()
    history.step(NOW, running_tokens=9, uploads=7, queue=0)
    history.step(NOW + STEP_S, running_tokens=0, uploads=2, queue=0)
    assert (history.points[1].tokens, history.points[1].uploads) == (0, 0)


def test_an_hour_is_kept_and_no_more() -> None:
    history = RecentHistory()
    for number in range(STEPS + 10):
        history.step(NOW + number * STEP_S, 0, 0, 0)
    assert len(history.points) * STEP_S == 3600
    assert history.points[-1].at == int(NOW) // STEP_S * STEP_S + (STEPS + 8) * STEP_S


def test_percentiles_of_two_processes_are_those_of_all() -> None:
    one, other = Latencies(), Latencies()
    for milliseconds in range(1, 51):
        one.add(milliseconds / 1000)
    for milliseconds in range(51, 101):
        other.add(milliseconds / 1000)
    classes = join_counts([one.counts, other.counts])
    for share in (0.5, 0.99):
        found = percentile_ms(classes, share)
        assert found is not None
        assert abs(found / (100 * share) - 1) < 0.03
    assert len(classes) < 80  # number of classes, not of values
    assert percentile_ms({}, 0.5) is None
