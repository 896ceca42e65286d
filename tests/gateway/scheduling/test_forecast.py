"""Forecasts of waiting times: correct for simple loads, plausible for any load."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gateway.scheduling.forecast import Pace, Standing, expected_wait_s

PRIORITIES = st.integers(-1, 1)
RATES = st.floats(1e-6, 1e6)
TAKEN = st.integers(0, 1000)
STANDINGS = st.builds(Standing, PRIORITIES, TAKEN, st.integers(0, 1000), RATES)


def _pace(hold_s: float, places: int, frees: int) -> tuple[Pace, float]:
    """Return the pace of `places` slots, each held for `hold_s`, and the end time in seconds.

    Each slot is taken again as soon as it is free.
    """
    pace, now = Pace(), 0.0
    pace.change_slots(places, now)
    for _ in range(frees):
        now += hold_s / places
        pace.change_slots(-1, now)
        pace.change_slots(1, now)
    return pace, now


@pytest.mark.parametrize("places", [1, 8, 64])
@pytest.mark.parametrize(("frees", "at_most"), [(8, 1.2), (16, 1.12), (1000, 1.07)])
def test_a_steady_load_is_known_for_what_it_is(places: int, frees: int, at_most: float) -> None:
    pace, now = _pace(5.0, places, frees)
    assert pace.is_known
    # The pace counts one more slot than became free.
    assert 1 <= pace.freed_per_s(places, now) / (places / 5.0) <= at_most


def test_after_eight_releases_nothing_is_assumed_any_more() -> None:
    pace, now = _pace(0.1, 8, 8)
    assert pace.freed_per_s(8, now) >= 8 / 0.1


def test_nothing_is_known_of_few() -> None:
    pace, _ = _pace(5.0, 1, 7)
    assert not pace.is_known
    for _ in range(7):
        pace.record_first_token(1.0)
    assert pace.first_token_s == 0
    pace.record_first_token(1.0)
    assert pace.first_token_s >= 1


def test_long_answers_count_while_they_run() -> None:
    pace, now = _pace(1.0, 10, 100)
    assert pace.freed_per_s(10, now + 600) < 0.1 * pace.freed_per_s(10, now)


def test_what_is_not_taken_is_no_slowness() -> None:
    pace, now = _pace(1.0, 4, 100)
    for _ in range(4):
        pace.change_slots(-1, now)
    before = pace.freed_per_s(4, now)
    assert pace.freed_per_s(4, now + 86_400) == before


def test_a_new_mix_is_soon_known() -> None:
    pace, now = _pace(60.0, 4, 1000)
    for _ in range(120):
        now += 0.25
        pace.change_slots(-1, now)
        pace.change_slots(1, now)
    assert 0.9 <= pace.freed_per_s(4, now) / 4 <= 1.1


@given(st.lists(st.tuples(st.integers(-5, 5), st.floats(0, 1e6)), max_size=100))
def test_a_pace_is_always_a_number(steps: list[tuple[int, float]]) -> None:
    pace, now, taken = Pace(), 0.0, 0
    for more, after in steps:
        now += after
        if taken + more >= 0:
            pace.change_slots(more, now)
            taken += more
        pace.record_first_token(after)
        rate = pace.freed_per_s(taken, now)
        assert 0 <= rate < math.inf
        assert (rate > 0) is (taken > 0)
        assert 0 <= pace.first_token_s < math.inf


@given(STANDINGS, st.lists(STANDINGS, max_size=6), st.integers(1, 1000))
def test_who_stands_further_behind_waits_no_less(
    mine: Standing, others: list[Standing], needed: int
) -> None:
    sooner = expected_wait_s(mine, others, needed)
    later = expected_wait_s(mine, others, needed + 1)
    assert sooner is not None
    assert later is not None
    assert 0 < sooner <= later < math.inf


@given(STANDINGS, st.lists(STANDINGS, max_size=6), st.integers(1, 1000))
def test_no_stranger_makes_it_longer_than_the_own_places_say(
    mine: Standing, others: list[Standing], needed: int
) -> None:
    """A tenant's own slots bound its wait, unless others have a higher priority."""
    assume(mine.in_use)
    others = [each for each in others if each.priority <= mine.priority]
    wait_s = expected_wait_s(mine, others, needed)
    assert wait_s is not None
    assert wait_s <= needed / mine.freed_per_s * (1 + 1e-9)


def test_who_has_nothing_gets_what_others_have_more() -> None:
    new = Standing(0, 0, 0, 0.0)
    hog = Standing(0, 8, 100, 4.0)
    assert expected_wait_s(new, [hog], 1) == pytest.approx(2 / 3 / 4.0)
    # A second tenant without slots takes every second free slot.
    assert expected_wait_s(new, [hog, Standing(0, 0, 1, 0.0)], 1) == pytest.approx(2 / 3 / 2.0)
    # A tenant with as many slots as the other one waits for its own slots.
    assert expected_wait_s(Standing(0, 8, 1, 2.0), [hog], 1) == pytest.approx(2 / 3 / 2.0)
    assert expected_wait_s(new, [], 1) is None


def test_the_lower_priority_waits_for_the_line_of_the_higher() -> None:
    batch, people = Standing(-10, 2, 5, 1.0), Standing(0, 6, 12, 3.0)
    assert expected_wait_s(batch, [people], 4) == pytest.approx((12 + 4 - 1 / 3) / 4.0)
    assert expected_wait_s(people, [batch], 4) == pytest.approx((4 - 1 / 3) / (3.0 + 1.0))
