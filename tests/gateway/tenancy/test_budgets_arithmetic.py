"""Budgets as the Redis script counts them, compared with a simple model over random steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from gateway.tenancy.limits.budgets import BudgetTotal
from gateway.tenancy.limits.lease import Lease
from gateway.tenancy.limits.request import (
    BUSY_WAIT_MS,
    NEVER,
    TOKENS,
    Decision,
    LimitRequest,
    Settlement,
    Spending,
)
from gateway.tenancy.limits.script import Grant, ScriptCall, is_answer, parse_grant, parse_reports
from tests.support.examples import scale_examples
from tests.support.limit_requests import ScriptAt, limit_request
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.slow

LEASE_MS = 15_000
START = datetime(2027, 12, 30, 22, tzinfo=UTC)  # a day, a month and a year end soon after
GATEWAYS = ("one", "two")
PAUSES_MS = (0, 0, 0, 1, 4_000, 14_999, 16_000, 3 * 3600_000, 20 * 86_400_000)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(PAUSES_MS),
        st.sampled_from(GATEWAYS),
        st.sampled_from(["take", "take", "settle", "settle", "renew"]),
        st.integers(0, 60),  # tokens reserved; the next number is the tokens used
        st.integers(0, 60),
        st.sampled_from(["", "", "", "the question is lost", "the answer is lost"]),
    ),
    min_size=20,
    max_size=40,
)
LIMIT = st.none() | st.integers(50, 250)


class _Model:
    """A model of the budgets.

    Used tokens count in the day and month in which they are reported, reserved tokens until their
    gateway's lease ends.
    """

    def __init__(self) -> None:
        self.used: list[tuple[datetime, int]] = []
        self.untold: Counter[str] = Counter()
        self.held: dict[str, tuple[int, datetime]] = {}

    def holds(self, gateway: str, now: datetime) -> int:
        tokens, until = self.held.get(gateway, (0, now))
        return tokens if until >= now else 0

    def hold(self, gateway: str, tokens: int, now: datetime) -> None:
        self.held[gateway] = max(0, tokens), now + timedelta(milliseconds=LEASE_MS)

    def tell(self, gateway: str, now: datetime) -> int:
        told = self.untold.pop(gateway, 0)
        self.used.append((now, told))
        return told

    def used_of(self, name: str, now: datetime) -> int:
        form = "%Y-%m-%d" if name == "tokens_per_day" else "%Y-%m"
        return sum([n for at, n in self.used if f"{at:{form}}" == f"{now:{form}}"])

    def wait_ms(self, name: str, limit: int, wanted: int, now: datetime) -> int:
        used, held = self.used_of(name, now), sum([self.holds(g, now) for g in GATEWAYS])
        if wanted > limit:
            return NEVER
        if used + wanted > limit:
            return _turns_in_ms(name, now)
        return BUSY_WAIT_MS if used + held + wanted > limit else 0


def _turns_in_ms(name: str, now: datetime) -> int:
    turn = now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
    while name == "tokens_per_month" and turn.day != 1:
        turn += timedelta(days=1)
    return _ms(turn) - _ms(now)


def _ms(at: datetime) -> int:
    return round(at.timestamp() * 1000)


class _Gateway:
    """A gateway process with its running requests."""

    def __init__(self, run: _Run, name: str) -> None:
        self.run, self.name = run, name
        self.lease = Lease("t", lambda: _ms(run.now) / 1000 - 1e9)
        self.running: list[LimitRequest] = []
        self.spent = 0

    def calls(self, call: ScriptCall, lost: str) -> Grant | None:
        """Run the script and update the model. Return the grant, or None if the call was lost."""
        if lost == "the question is lost":
            self.lease.lose()
            return None
        answer = self.run.script(_ms(self.run.now), self.name, call, LEASE_MS)
        assert is_answer(call, answer)
        self.run.model.tell(self.name, self.run.now)
        for report in parse_reports(call, answer):
            assert report.used == self.run.model.used_of(report.name, self.run.now)
            assert report.reset_ms == _turns_in_ms(report.name, self.run.now)
        grant = parse_grant(call, answer)
        held: Any = call.state["held"]
        holds = held[TOKENS] + call.spare[TOKENS] + grant.granted[TOKENS]
        self.run.model.hold(self.name, holds, self.run.now)
        if lost:
            self.lease.lose()
            return None
        self.lease.apply(call, grant)
        return grant

    def take(self, wanted: int, lost: str) -> None:
        run = self.run
        asked = replace(run.asked, tokens=wanted)
        if (decision := self.lease.decide(asked)) is None:
            call = self.lease.call(asked)
            held: Any = call.state["held"]
            if lost != "the question is lost":
                # The call returns all tokens that the gateway had spare.
                run.model.hold(self.name, held[TOKENS], run.now)
                run.model.tell(self.name, run.now)
            waits = [
                run.model.wait_ms(n, limit, wanted, run.now) for n, limit in run.limits.items()
            ]
            grant = self.calls(call, lost)
            if grant is None:
                return
            assert grant.wait_ms == (NEVER if NEVER in waits else max(waits))
            assert (grant.refused is None) == (not any(waits))
            if grant.refused is not None:
                self.check(self.lease.build_refusal(asked, grant))
                return
            decision = self.lease.decide(asked)
            assert decision is not None
            self.check(decision)
        self.running.append(asked)

    def check(self, decision: Decision) -> None:
        model, now = self.run.model, self.run.now
        held = sum([model.holds(name, now) for name in GATEWAYS]) - self.lease._spare[TOKENS]
        for name, quota in decision.quotas.items():
            assert (quota.used, quota.held) == (model.used_of(name, now), held)

    def settle(self, used: int, lost: str) -> None:
        if not self.running:
            return
        asked = self.running.pop(0)
        used = min(used, asked.tokens)
        kept = (asked.tokens - used) // 2
        if kept:
            self.running.append(replace(asked, tokens=kept))
        self.spent += used
        self.run.model.untold[self.name] += used
        self.lease.spend(Spending("t", asked.budgets, used))
        self.lease.settle(Settlement(asked, asked.tokens, used, kept))
        self.calls(self.lease.call(), lost)

    def renew(self, lost: str) -> None:
        self.lease.spend(Spending("t", self.run.asked.budgets, 0))
        self.calls(self.lease.call(), lost)


class _Run:
    def __init__(self, script_at: ScriptAt, asked: LimitRequest) -> None:
        self.script, self.asked, self.limits = script_at, asked, asked.limits
        self.now = START
        self.model = _Model()
        self.gateways = {name: _Gateway(self, name) for name in GATEWAYS}

    def renew_all(self) -> None:
        for gateway in self.gateways.values():
            gateway.renew("")


@given(LIMIT, LIMIT, STEPS)
@scale_examples(4, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_budgets_are_counted_as_the_model_does(
    shared_redis: RedisServer, day: int | None, month: int | None, steps: list[Any]
) -> None:
    asked = limit_request("t", day=day, month=month)
    if not asked.limits:
        return
    with shared_redis.client() as client:
        client.flushall()
        run = _Run(ScriptAt(client), asked)
        for pause, name, what, wanted, used, lost in steps:
            # A gateway reports again within an hour of a lost answer, so report before long pauses
            if pause > 60_000:
                run.renew_all()
            run.now += timedelta(milliseconds=pause)
            gateway = run.gateways[name]
            if what == "take":
                gateway.take(wanted, lost)
            elif what == "settle":
                gateway.settle(used, lost)
            else:
                gateway.renew(lost)
        run.renew_all()
        # Each token was counted once, although calls and answers were lost.
        total = sum([gateway.spent for gateway in run.gateways.values()])
        assert sum([n for _, n in run.model.used]) == total


@given(st.integers(1, 300), STEPS)
@scale_examples(1, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_budget_is_passed_where_leases_are_kept(
    shared_redis: RedisServer, limit: int, steps: list[Any]
) -> None:
    """Budgets hold if leases are renewed in time and no answer exceeds its reservation."""
    with shared_redis.client() as client:
        client.flushall()
        run = _Run(ScriptAt(client), limit_request("t", day=limit, month=2 * limit))
        for pause, name, what, wanted, used, lost in steps:
            # A gateway reports again within an hour of a lost answer, so report before long pauses
            if pause > 60_000:
                run.renew_all()
            run.now += timedelta(milliseconds=pause)
            run.renew_all()
            gateway = run.gateways[name]
            if what == "take":
                gateway.take(wanted, lost)
            else:
                gateway.settle(used, lost)
            assert run.model.used_of("tokens_per_day", run.now) <= limit
            assert run.model.used_of("tokens_per_month", run.now) <= 2 * limit


def _lease(asked: LimitRequest, spent: int) -> Lease:
    lease = Lease("t", lambda: 0.0)
    lease.spend(Spending("t", asked.budgets, spent))
    return lease


def test_days_and_months_are_those_of_the_calendar(shared_redis: RedisServer) -> None:
    asked = limit_request("t", day=10, month=10, wanted=1)
    turn = datetime(2024, 1, 1, tzinfo=UTC)
    with shared_redis.client() as client:
        client.flushall()
        script_at = ScriptAt(client)
        while turn.year < 2100:
            for now in (turn - timedelta(milliseconds=1), turn, turn + timedelta(days=27)):
                call = _lease(asked, 0).call()
                for report in parse_reports(call, script_at(_ms(now), "g", call)):
                    assert report.reset_ms == _turns_in_ms(report.name, now), now
                    first = now if report.name == "tokens_per_day" else now.replace(day=1)
                    assert report.first_day == _ms(first) // (24 * 3600 * 1000)
            turn = (turn + timedelta(days=31)).replace(day=1)


def test_a_redis_that_forgot_its_last_second_is_told_again(shared_redis: RedisServer) -> None:
    asked = limit_request("t", day=100)
    with shared_redis.client() as client:
        client.flushall()
        script_at = ScriptAt(client)
        known: list[BudgetTotal] = []
        lease = Lease("t", lambda: 0.0, totals=lambda _: known)

        def used(more: int) -> int:
            lease.spend(Spending("t", asked.limits, more))
            call = lease.call()
            answer = script_at(_ms(START), "g", call)
            lease.apply(call, parse_grant(call, answer))
            (report,) = parse_reports(call, answer)
            known[:] = [BudgetTotal(report.name, report.first_day, report.used)]
            return report.used

        assert used(0) == 0
        kept: Any = client.dump("budgets:{t}")
        assert used(20) == 20
        client.restore("budgets:{t}", 0, kept, replace=True)
        assert used(2) == 22


def test_what_ended_is_dropped_and_nothing_expires(shared_redis: RedisServer) -> None:
    """Budget keys never expire, but fields of past days, months and leases are removed."""
    asked = limit_request("t", day=10**6, month=10**6, wanted=1)
    with shared_redis.client() as client:
        client.flushall()
        script_at = ScriptAt(client)
        for day in range(100):
            now = _ms(START + timedelta(days=day))
            script_at(now, f"worker of day {day}", _lease(asked, 5).call(asked), LEASE_MS)
        fields: Any = client.hgetall("budgets:{t}")
        kinds = Counter(name[:2] for name in fields)
        assert kinds == {b"d:": 1, b"m:": 1, b"h:": 1}
        assert client.ttl("budgets:{t}") == -1
