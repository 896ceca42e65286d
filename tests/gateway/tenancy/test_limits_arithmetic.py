"""The arithmetic of the limits: what may pass, and that Lua and Python agree on it."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.tenancy.limits.limits import duration
from gateway.tenancy.limits.local import LocalLimits
from gateway.tenancy.limits.request import NEVER, Decision, LimitRequest, Settlement
from tests.support.redis_server import RedisServer, running_redis

MINUTE_MS = 60_000
NAMES = (None, "requests_per_minute", "tokens_per_minute", "concurrent_requests")
STEPS = st.lists(
    st.tuples(
        st.integers(0, 40_000),  # ms since the step before
        st.integers(1, 60),  # tokens reserved
        st.integers(0, 60),  # tokens really used
        st.booleans(),  # whether the oldest running request ends first
    ),
    max_size=60,
)
LIMIT = st.none() | st.integers(1, 100)


class _Run:
    """Plays steps against one counter and remembers what passed."""

    def __init__(self, requests: int | None, tokens: int | None, concurrent: int | None) -> None:
        self.limits = requests, tokens, concurrent
        self.local = LocalLimits()
        self.running: list[tuple[int, int, int]] = []
        self.passed: list[tuple[int, int]] = []
        """Times in ms, and what was reserved then."""

    def ask(self, wanted: int) -> LimitRequest:
        return LimitRequest("t", *self.limits, wanted)

    def take(self, now: int, wanted: int, used: int) -> Decision:
        decision = self.local.take(self.ask(wanted), now)
        if decision.refused is None:
            self.passed.append((now, wanted))
            self.running.append((decision.second, wanted, used))
        return decision

    def settlement(self) -> Settlement:
        second, wanted, used = self.running.pop(0)
        return Settlement("t", second, used - wanted, self.limits[2] is not None)


@given(LIMIT, LIMIT, LIMIT, STEPS)
@settings(deadline=None)
def test_no_minute_lets_more_pass_than_the_limit(
    requests: int | None, tokens: int | None, concurrent: int | None, steps: list[Any]
) -> None:
    run, now = _Run(requests, tokens, concurrent), 7_000_000
    for pause, wanted, used, _ in steps:
        now += pause
        decision = run.take(now, wanted, used)
        assert (decision.refused is None) == (decision.wait_ms == 0)
        minute = [(at, n) for at, n in run.passed if at > now - MINUTE_MS]
        assert requests is None or len(minute) <= requests
        assert tokens is None or sum(n for _, n in minute) <= tokens
        assert concurrent is None or len(run.running) <= concurrent
        assert decision.remaining_requests >= 0
        assert decision.remaining_tokens >= 0
        assert 0 <= decision.reset_requests_ms <= MINUTE_MS + 1000


@given(LIMIT, LIMIT, STEPS, st.integers(1, 60))
@settings(deadline=None)
def test_the_wait_is_true_and_not_too_long(
    requests: int | None, tokens: int | None, steps: list[Any], wanted: int
) -> None:
    """After `wait_ms` the request passes; a millisecond before it does not."""
    run, now = _Run(requests, tokens, None), 7_000_000
    for pause, reserved, used, settle in steps:
        now += pause // 10
        run.take(now, reserved, used)
        if settle and run.running:
            run.local.settle(run.settlement())
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
    ask = LimitRequest("t", None, 50, None, reserved)
    first = limits.take(ask, now)
    limits.settle(Settlement("t", first.second, used - reserved, False))
    assert limits.take(LimitRequest("t", None, 50, None, 50 - used), now).refused is None
    assert limits.take(LimitRequest("t", None, 50, None, 1), now).refused == "tokens_per_minute"


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@given(LIMIT, LIMIT, LIMIT, STEPS)
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_redis_counts_as_python_does(
    redis: RedisServer,
    requests: int | None,
    tokens: int | None,
    concurrent: int | None,
    steps: list[Any],
) -> None:
    run, now = _Run(requests, tokens, concurrent), 1_700_000_000_000
    text = importlib.resources.files("gateway.tenancy.limits").joinpath("script.lua").read_text()
    assert text.count("redis.call('TIME')") == 1
    with redis.client() as client:
        client.flushall()
        # The last argument is the clock; leases do not end within a run.
        clock = "{ math.floor(ARGV[#ARGV] / 1000), ARGV[#ARGV] % 1000 * 1000 }"
        script: Any = client.register_script(text.replace("redis.call('TIME')", clock))

        def call(*arguments: object) -> Any:
            return script(keys=["limits:{t}"], args=[arguments[0], "g", 10**9, *arguments[1:], now])

        limits = [-1 if limit is None else limit for limit in (requests, tokens, concurrent)]
        for pause, wanted, used, settle in steps:
            now += pause
            if settle and run.running:
                settlement = run.settlement()
                run.local.settle(settlement)
                ended = (settlement.second, settlement.difference, int(settlement.concurrent))
                assert call("settle", *ended) == 1
            refused, *numbers = call("take", *limits, wanted)
            assert (NAMES[refused], *numbers) == run.take(now, wanted, used)


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
