"""Budgets as the script counts them, against a model of a few lines: many gateways, any time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.tenancy.limits import script
from gateway.tenancy.limits.request import BUSY_WAIT_MS, NEVER, LimitRequest, Settlement
from gateway.tenancy.limits.script import Call, Own, decision_of, reports_of
from tests.support.limit_requests import ScriptAt, limit_request
from tests.support.redis_server import RedisServer

pytestmark = pytest.mark.slow

LEASE_MS = 15_000
START = datetime(2027, 12, 30, 22, tzinfo=UTC)  # a day, a month and a year end soon
GATEWAYS = ("one", "two")
PAUSES_MS = (0, 0, 0, 1, 4_000, 14_999, 16_000, 3 * 3600_000, 20 * 86_400_000)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(PAUSES_MS),
        st.sampled_from(GATEWAYS),
        st.sampled_from(["take", "take", "settle", "settle", "renew"]),
        st.integers(0, 60),  # tokens reserved, of which some are used
        st.integers(0, 60),
        st.sampled_from(["", "", "", "the question is lost", "the answer is lost"]),
    ),
    min_size=20,
    max_size=40,
)
LIMIT = st.none() | st.integers(50, 250)


class _Model:
    """What is used counts in the day and month in which it was told, what is held for its lease.

    A question that changes what is used or held renews the lease; one that changes neither, as of a
    request that reserves nothing, writes nothing.
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
    """What a gateway process knows: its running requests, and what it was answered."""

    def __init__(self, run: _Run, name: str) -> None:
        self.run, self.name, self.own = run, name, Own()
        self.told = 0  # by the last question
        self.running: list[LimitRequest] = []

    def calls(self, call: Call, lost: str) -> list[int] | None:
        """What the script answers, if that comes back. The model is to be told in the same way."""
        if lost == "the question is lost":
            return None
        answer = self.run.script(_ms(self.run.now), self.name, call, LEASE_MS)
        assert script.is_an_answer(call, answer)
        self.told = self.run.model.tell(self.name, self.run.now)
        for report in reports_of(call, answer):
            assert report.used == self.run.model.used_of(report.name, self.run.now)
            assert report.reset_ms == _turns_in_ms(report.name, self.run.now)
        if lost:
            return None
        self.own.known = max(self.own.known, call.spent)
        return answer

    def take(self, wanted: int, lost: str) -> None:
        model, now, limits = self.run.model, self.run.now, self.run.limits
        asked = replace(self.run.asked, tokens=wanted)
        answer = self.calls(script.take(asked, self.own), lost)
        if lost == "the question is lost":
            return
        waits = [model.wait_ms(name, limit, wanted, now) for name, limit in limits.items()]
        passes = not any(waits)
        more = wanted if passes else 0
        if more or self.told:
            model.hold(self.name, model.holds(self.name, now) + more, now)
        if answer is not None:
            decision = decision_of(asked, answer)
            assert decision.wait_ms == (NEVER if NEVER in waits else max(waits))
            assert (decision.refused is None) == passes
            held = sum([model.holds(name, now) for name in GATEWAYS])
            for name, quota in decision.quotas.items():
                assert (quota.used, quota.held) == (model.used_of(name, now), held)
            if passes:
                self.running.append(asked)
                self.own.held += wanted

    def settle(self, used: int, lost: str) -> None:
        if not self.running:
            return
        asked = self.running.pop(0)
        used = min(used, asked.tokens)
        kept = (asked.tokens - used) // 2
        if kept:
            self.running.append(replace(asked, tokens=kept))
        self.own.held += kept - asked.tokens
        self.own.spent += used
        self.run.model.untold[self.name] += used
        held = self.run.model.holds(self.name, self.run.now)
        self.calls(script.settle(Settlement(asked, 0, asked.tokens, 0, used, kept), self.own), lost)
        if lost != "the question is lost":
            self.run.model.hold(self.name, held - asked.tokens + kept, self.run.now)

    def renew(self, lost: str) -> None:
        self.own.budgets = self.run.limits
        self.calls(script.renew("t", self.own), lost)
        if lost != "the question is lost":
            self.run.model.hold(self.name, self.own.held, self.run.now)


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
@settings(
    deadline=None, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
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
            if pause > 60_000:  # within an hour of a lost answer Redis is told again
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
        # Whatever was lost on the way, each token was counted once.
        total = sum([gateway.own.spent for gateway in run.gateways.values()])
        assert sum([n for _, n in run.model.used]) == total


@given(st.integers(1, 300), STEPS)
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_budget_is_passed_where_leases_are_kept(
    shared_redis: RedisServer, limit: int, steps: list[Any]
) -> None:
    """And where no answer uses more than it reserved; whatever is lost on the way."""
    with shared_redis.client() as client:
        client.flushall()
        run = _Run(ScriptAt(client), limit_request("t", day=limit, month=2 * limit))
        for pause, name, what, wanted, used, lost in steps:
            run.now += timedelta(milliseconds=pause)
            run.renew_all()
            gateway = run.gateways[name]
            if what == "take":
                gateway.take(wanted, lost)
            else:
                gateway.settle(used, lost)
            assert run.model.used_of("tokens_per_day", run.now) <= limit
            assert run.model.used_of("tokens_per_month", run.now) <= 2 * limit


def test_days_and_months_are_those_of_the_calendar(shared_redis: RedisServer) -> None:
    asked = limit_request("t", day=10, month=10, wanted=1)
    turn = datetime(2024, 1, 1, tzinfo=UTC)
    with shared_redis.client() as client:
        client.flushall()
        script_at = ScriptAt(client)
        while turn.year < 2100:
            for now in (turn - timedelta(milliseconds=1), turn, turn + timedelta(days=27)):
                answer = script_at(_ms(now), "g", script.renew("t", Own(budgets=asked.limits)))
                _, _, of_day, _, of_month = answer
                assert of_day == _turns_in_ms("tokens_per_day", now), now
                assert of_month == _turns_in_ms("tokens_per_month", now), now
            turn = (turn + timedelta(days=31)).replace(day=1)


def test_a_redis_that_forgot_its_last_second_is_told_again(shared_redis: RedisServer) -> None:
    asked = limit_request("t", day=100)
    with shared_redis.client() as client:
        client.flushall()
        script_at = ScriptAt(client)

        def used(spent: int) -> int:
            own = Own(spent=spent, known=spent, budgets=asked.limits)
            call = script.renew("t", own)
            (report,) = reports_of(call, script_at(_ms(START), "g", call))
            return report.used

        assert used(0) == 0
        kept: Any = client.dump("budgets:{t}")
        assert used(20) == 20
        client.restore("budgets:{t}", 0, kept, replace=True)
        assert used(22) == 22


def test_what_ended_is_dropped_and_nothing_expires(shared_redis: RedisServer) -> None:
    """What makes room by age takes no budget; yet fields do not pile up."""
    asked = limit_request("t", day=10**6, month=10**6, wanted=1)
    with shared_redis.client() as client:
        client.flushall()
        script_at = ScriptAt(client)
        for day in range(100):
            now = _ms(START + timedelta(days=day))
            script_at(now, f"worker of day {day}", script.take(asked, Own(spent=5)), LEASE_MS)
        fields: Any = client.hgetall("budgets:{t}")
        kinds = Counter(name[:2] for name in fields)
        assert kinds == {b"d:": 1, b"m:": 1, b"h:": 1}
        assert client.ttl("budgets:{t}") == -1
