"""The arithmetic of rate limits: no minute exceeds a limit, and Lua and Python agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from gateway.tenancy.limits.limits import duration
from gateway.tenancy.limits.local import LocalLimits
from gateway.tenancy.limits.request import BUSY_WAIT_MS, NEVER, Decision, LimitRequest, Settlement
from tests.support.examples import scale_examples
from tests.support.limit_requests import LeaseAt, ScriptAt, limit_request
from tests.support.redis_server import RedisServer

MINUTE_MS = 60_000
STEPS = st.lists(
    st.tuples(
        st.integers(0, 40_000),  # ms since the previous step
        st.integers(1, 60),  # tokens reserved
        st.integers(0, 60),  # tokens used
        st.booleans(),  # True if the oldest running request ends first
        st.integers(1, 9),  # slots
    ),
    max_size=60,
)
LIMIT = st.none() | st.integers(1, 100)


class _Running(NamedTuple):
    asked: LimitRequest
    used: int


class _Run:
    """A run of steps against one counter, with a record of the admitted requests."""

    def __init__(self, requests: int | None, tokens: int | None, concurrent: int | None) -> None:
        self.limits = requests, tokens, concurrent
        self.now = 1_700_000_000_000
        self.local = LocalLimits(lambda: self.now)
        self.running: list[_Running] = []
        self.passed: list[tuple[int, int]] = []
        """(time in ms, tokens reserved) of each admitted request."""

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

    def take(self, asked: LimitRequest, used: int) -> Decision:
        decision = self.local.take(asked)
        if decision.refused is None:
            self.passed.append((self.now, asked.tokens))
            self.running.append(_Running(asked, used))
        return decision

    def settlement(self) -> Settlement:
        """End the oldest request and return its settlement.

        A third of its used tokens stays reserved, as if another request that runs still held them.
        """
        asked, used = self.running.pop(0)
        places = 0 if self.limits[2] is None else asked.slots
        if self.limits[1] is None:
            return Settlement(asked, slots=places)
        used = min(used, asked.tokens)
        kept = used // 3
        if kept:
            self.running.append(_Running(replace(asked, tokens=kept, slots=0), 0))
        return Settlement(asked, asked.tokens, used - kept, kept, places)


@given(LIMIT, LIMIT, LIMIT, STEPS)
def test_no_minute_lets_more_pass_than_the_limit(
    requests: int | None, tokens: int | None, concurrent: int | None, steps: list[Any]
) -> None:
    run = _Run(requests, tokens, concurrent)
    for pause, wanted, used, _, places in steps:
        run.now += pause
        decision = run.take(run.ask(wanted, places), used)
        assert (decision.refused is None) == (decision.wait_ms == 0)
        minute = [(at, n) for at, n in run.passed if at > run.now - MINUTE_MS]
        assert requests is None or len(minute) <= requests
        assert tokens is None or sum(n for _, n in minute) <= tokens
        assert concurrent is None or sum(one.asked.slots for one in run.running) <= concurrent
        for quota in decision.quotas.values():
            assert 0 <= quota.used <= quota.limit
            assert 0 <= quota.reset_ms <= MINUTE_MS + 1000


@given(LIMIT, LIMIT, STEPS, st.integers(1, 60))
def test_the_wait_is_true_and_not_too_long(
    requests: int | None, tokens: int | None, steps: list[Any], wanted: int
) -> None:
    """The request passes after `wait_ms`, and is still refused a millisecond earlier."""
    run = _Run(requests, tokens, None)
    for pause, reserved, used, settled, places in steps:
        run.now += pause // 10
        run.take(run.ask(reserved, places), used)
        if settled and run.running:
            run.local.settle(run.settlement())
    while run.running:  # end all, because the forecast cannot know when running requests end
        run.local.settle(run.settlement())
    decision = run.local.take(run.ask(wanted))
    if decision.wait_ms == NEVER:
        assert tokens is not None
        assert wanted > tokens
    elif decision.wait_ms:
        run.now += decision.wait_ms - 1
        assert run.local.take(run.ask(wanted)).refused is not None
        run.now += 1
        assert run.local.take(run.ask(wanted)).refused is None


@given(st.integers(1, 50), st.integers(1, 50))
def test_settling_gives_back_what_was_not_used(reserved: int, used: int) -> None:
    limits = LocalLimits(lambda: 5_000)

    def ask(wanted: int) -> Decision:
        return limits.take(limit_request("t", tokens=50, wanted=wanted))

    ask(reserved)
    limits.settle(Settlement(limit_request("t", tokens=50), reserved, used))
    assert ask(50 - used).refused is None
    assert ask(1).refused == "tokens_per_minute"


def test_what_is_used_later_counts_from_then() -> None:
    """Tokens reserved in second 5 and used in second 60 count until second 121."""
    now_ms = [5_000]
    limits = LocalLimits(lambda: now_ms[0])
    asked = limit_request("t", tokens=50, wanted=50)
    assert limits.take(asked).refused is None
    now_ms[0] = 59_000
    assert limits.take(asked).wait_ms == BUSY_WAIT_MS
    now_ms[0] = 60_000
    limits.settle(Settlement(asked, 50, 50))
    now_ms[0] = 66_000
    assert limits.take(asked).wait_ms == 121_000 - 66_000
    now_ms[0] = 121_000
    assert limits.take(asked).refused is None


def test_more_than_may_ever_be_at_once_is_not_to_be_tried_again() -> None:
    limits = LocalLimits(lambda: 0)

    def ask(places: int) -> Decision:
        return limits.take(limit_request("t", concurrent=4, places=places))

    assert (ask(5).refused, ask(5).wait_ms) == ("concurrent_requests", NEVER)
    assert ask(3).refused is None
    assert ask(2).wait_ms > 0
    assert ask(1).refused is None


@given(LIMIT, LIMIT, LIMIT, STEPS)
@scale_examples(1, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_redis_counts_as_python_does(
    shared_redis: RedisServer,
    requests: int | None,
    tokens: int | None,
    concurrent: int | None,
    steps: list[Any],
) -> None:
    """The decisions equal those of Python if a gateway returns all spare units after each step."""
    run = _Run(requests, tokens, concurrent)
    with shared_redis.client() as client:
        client.flushall()
        lease = LeaseAt(ScriptAt(client), "g", lambda: run.now)
        for pause, wanted, used, settled, places in steps:
            # Report every 10 s, so that the lease and its slots do not expire.
            for _ in range(pause // 10_000):
                run.now += 10_000
                lease.report()
            run.now += pause % 10_000
            if settled and run.running:
                settlement = run.settlement()
                run.local.settle(settlement)
                lease.lease.settle(settlement)
                lease.report()
            asked = run.ask(wanted, places)
            if asked.limits:
                lease.lease._refusal = None  # a cached refusal would have older counts
                assert lease.take(asked) == run.take(asked, used)
                lease.report()


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
