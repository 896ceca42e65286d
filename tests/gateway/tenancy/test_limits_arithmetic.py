"""The arithmetic of the limits: what may pass, and that Lua and Python agree on it."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.tenancy.limits.limits import duration
from gateway.tenancy.limits.local import LocalLimits
from gateway.tenancy.limits.request import NEVER, Decision, LimitRequest, Settlement
from gateway.tenancy.limits.script import Own, decision_of, settle, take
from tests.support.limit_requests import ScriptAt, limit_request
from tests.support.redis_server import RedisServer

MINUTE_MS = 60_000
STEPS = st.lists(
    st.tuples(
        st.integers(0, 40_000),  # ms since the step before
        st.integers(1, 60),  # tokens reserved
        st.integers(0, 60),  # tokens really used
        st.booleans(),  # whether the oldest running request ends first
        st.integers(1, 9),  # places
    ),
    max_size=60,
)
LIMIT = st.none() | st.integers(1, 100)


class _Running(NamedTuple):
    asked: LimitRequest
    since: int
    used: int


class _Run:
    """Plays steps against one counter and remembers what passed."""

    def __init__(self, requests: int | None, tokens: int | None, concurrent: int | None) -> None:
        self.limits = requests, tokens, concurrent
        self.local = LocalLimits()
        self.running: list[_Running] = []
        self.passed: list[tuple[int, int]] = []
        """Times in ms, and what was reserved then."""

    def ask(self, wanted: int, places: int = 1) -> LimitRequest:
        requests, tokens, concurrent = self.limits
        return limit_request(
            "t",
            requests=requests,
            tokens=tokens,
            concurrent=concurrent,
            wanted=wanted,
            places=places,
        )

    def take(self, now: int, asked: LimitRequest, used: int) -> Decision:
        decision = self.local.take(asked, now)
        if decision.refused is None:
            self.passed.append((now, asked.tokens))
            self.running.append(_Running(asked, now // 1000, used))
        return decision

    def settlement(self, now: int) -> Settlement:
        """As it ends; of what it used, some may be held on: to a counter that is the same."""
        asked, since, used = self.running.pop(0)
        places = 0 if self.limits[2] is None else asked.places
        kept = used // 3
        return Settlement(asked, since, asked.tokens, now // 1000, used - kept, kept, places)


@given(LIMIT, LIMIT, LIMIT, STEPS)
@settings(deadline=None)
def test_no_minute_lets_more_pass_than_the_limit(
    requests: int | None, tokens: int | None, concurrent: int | None, steps: list[Any]
) -> None:
    run, now = _Run(requests, tokens, concurrent), 7_000_000
    for pause, wanted, used, _, places in steps:
        now += pause
        decision = run.take(now, run.ask(wanted, places), used)
        assert (decision.refused is None) == (decision.wait_ms == 0)
        minute = [(at, n) for at, n in run.passed if at > now - MINUTE_MS]
        assert requests is None or len(minute) <= requests
        assert tokens is None or sum(n for _, n in minute) <= tokens
        assert concurrent is None or sum(one.asked.places for one in run.running) <= concurrent
        for quota in decision.quotas.values():
            assert 0 <= quota.used <= quota.limit
            assert 0 <= quota.reset_ms <= MINUTE_MS + 1000


@given(LIMIT, LIMIT, STEPS, st.integers(1, 60))
@settings(deadline=None)
def test_the_wait_is_true_and_not_too_long(
    requests: int | None, tokens: int | None, steps: list[Any], wanted: int
) -> None:
    """After `wait_ms` the request passes; a millisecond before it does not."""
    run, now = _Run(requests, tokens, None), 7_000_000
    for pause, reserved, used, settled, places in steps:
        now += pause // 10
        run.take(now, run.ask(reserved, places), used)
        if settled and run.running:
            run.local.settle(run.settlement(now))
    decision = run.local.take(run.ask(wanted), now)
    if decision.wait_ms == NEVER:
        assert tokens is not None
        assert wanted > tokens
    elif decision.wait_ms:
        assert run.local.take(run.ask(wanted), now + decision.wait_ms - 1).refused is not None
        assert run.local.take(run.ask(wanted), now + decision.wait_ms).refused is None


@given(st.integers(1, 50), st.integers(1, 50))
def test_settling_gives_back_what_was_not_used(reserved: int, used: int) -> None:
    limits, now = LocalLimits(), 5_000

    def ask(wanted: int) -> Decision:
        return limits.take(limit_request("t", tokens=50, wanted=wanted), now)

    ask(reserved)
    limits.settle(Settlement(limit_request("t", tokens=50), 5, reserved, 5, used))
    assert ask(50 - used).refused is None
    assert ask(1).refused == "tokens_per_minute"


def test_what_is_used_later_counts_from_then() -> None:
    """Reserved in second 5 and used in second 60, it is in the way until second 121."""
    limits = LocalLimits()
    asked = limit_request("t", tokens=50, wanted=50)

    def ask(now_ms: int) -> Decision:
        return limits.take(asked, now_ms)

    assert ask(5_000).refused is None
    limits.settle(Settlement(asked, 5, 50, 60, 50))
    assert ask(66_000).wait_ms == 121_000 - 66_000
    assert ask(121_000).refused is None


def test_more_than_may_ever_be_at_once_is_not_to_be_tried_again() -> None:
    limits = LocalLimits()

    def ask(places: int) -> Decision:
        return limits.take(limit_request("t", concurrent=4, places=places), 0)

    assert (ask(5).refused, ask(5).wait_ms) == ("concurrent_requests", NEVER)
    assert ask(3).refused is None
    assert ask(2).wait_ms > 0
    assert ask(1).refused is None


@given(LIMIT, LIMIT, LIMIT, STEPS)
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_redis_counts_as_python_does(
    shared_redis: RedisServer,
    requests: int | None,
    tokens: int | None,
    concurrent: int | None,
    steps: list[Any],
) -> None:
    run, now = _Run(requests, tokens, concurrent), 1_700_000_000_000
    with shared_redis.client() as client:
        client.flushall()
        script = ScriptAt(client)
        own = Own()
        for pause, wanted, used, settled, places in steps:
            now += pause
            if settled and run.running:
                settlement = run.settlement(now)
                run.local.settle(settlement)
                assert script(now, "g", settle(settlement, own)) == []
            asked = run.ask(wanted, places)
            answer = script(now, "g", take(asked, own))
            assert answer[3] == 0
            assert decision_of(asked, answer) == run.take(now, asked, used)


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (0, "0s"),
        (1, "1ms"),
        (999, "999ms"),
        (1000, "1s"),
        (7660, "7.66s"),
        (60_000, "1m0s"),
        (360_000, "6m0s"),
        (3_630_000, "1h0m30s"),
    ],
)
def test_durations_are_written_as_openai_does(milliseconds: int, text: str) -> None:
    assert duration(milliseconds) == text
