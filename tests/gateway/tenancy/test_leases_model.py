"""Leases of several gateways against the real script, with late and lost calls and crashes.

The gateways run the product's state machine. The test controls calls, answers and time, and a
simple model records which requests really ran, and when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, event, given
from hypothesis import strategies as st

from gateway.tenancy.limits.lease import LEASE_S, TICK_S, Lease
from gateway.tenancy.limits.request import LimitRequest, Settlement, Spending
from gateway.tenancy.limits.script import (
    ScriptCall,
    count_unfit_fields,
    is_answer,
    parse_grant,
    parse_reports,
)
from tests.support.examples import scale_examples
from tests.support.limit_requests import ScriptAt, limit_request
from tests.support.redis_server import RedisServer

START_MS = 1_700_000_040_000
GATEWAYS = 3
WINDOW_MS = 60_000
LEASE_MS = int(LEASE_S * 1000)
FOR_EVER_MS = 2 * (WINDOW_MS + LEASE_MS)
PAUSES_MS = (0, 0, 0, 1, 250, 250, 250, 999, 5_000, 20_000, 45_000, 61_000)
ACTS = (
    *["serve"] * 6,
    *["ask"] * 3,
    *["execute", "answer", "end", "tick"] * 2,
    *["late answer", "lose the question", "lose the answer", "a lost question arrives"] * 2,
    *["die"] * 2,
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(ACTS),
        st.integers(0, GATEWAYS - 1),
        st.integers(1, 30),  # number of requests that start or end
        st.integers(1, 6),  # tokens reserved; the next number is the tokens used
        st.integers(0, 6),
        st.sampled_from(PAUSES_MS),
    ),
    min_size=20,
    max_size=60,
)
LIMIT = st.none() | st.integers(1, 60) | st.integers(61, 600)


@dataclass(eq=False)
class _Running:
    request: LimitRequest
    gateway: _Gateway
    is_lost: bool = False
    """The gateway did not reach Redis within its lease, so Redis may grant the units to others."""


class _World:
    """A record of the requests that really ran and the tokens that were really used."""

    def __init__(self, script: ScriptAt, limits: LimitRequest) -> None:
        self.script = script
        self.limits = limits
        self.now = START_MS
        self.admitted: list[int] = []
        """Time of each request in ms."""
        self.used: list[tuple[int, int]] = []
        """(time in ms, number of tokens)."""
        self.running: list[_Running] = []
        self.gateways = [_Gateway(self, f"g{n}") for n in range(GATEWAYS)]
        self.born = GATEWAYS
        self.lost: list[tuple[str, ScriptCall]] = []
        self.lost_arrived = self.faults = 0

    def check(self) -> None:
        most = self.limits.limits
        for one in self.running:
            one.is_lost |= one.gateway.heard + LEASE_MS <= self.now
        recent = [at for at in self.admitted if at > self.now - WINDOW_MS]
        assert len(recent) <= most.get("requests_per_minute", 10**9)
        used = sum([n for at, n in self.used if at > self.now - WINDOW_MS])
        held = sum([one.request.tokens for one in self.running if not one.is_lost])
        assert used + held <= most.get("tokens_per_minute", 10**9)
        places = sum([one.request.slots for one in self.running if not one.is_lost])
        assert places <= most.get("concurrent_requests", 10**9)
        # A lease that expires counts as used in Redis, although its units may be unused.
        self.faults += any(one.heard + LEASE_MS <= self.now for one in self.gateways)

    def replace(self, gateway: _Gateway) -> None:
        """Kill a gateway with its requests, and start another one.

        The dead gateway's call may still arrive at Redis.
        """
        if gateway.call is not None and gateway.numbers is None:
            self.lost.append((gateway.name, gateway.call))
        self.running = [one for one in self.running if one.gateway is not gateway]
        self.gateways[self.gateways.index(gateway)] = _Gateway(self, f"g{self.born}")
        self.born += 1


class _Gateway:
    """A gateway process and its call in progress."""

    def __init__(self, world: _World, name: str) -> None:
        self.world, self.name = world, name
        self.epoch = 0
        self.lease = Lease("t", lambda: world.now / 1000 - 1e9, lambda: self.epoch)
        self.call: ScriptCall | None = None
        self.numbers: list[int] | None = None
        self.heard = world.now
        self.spent = 0

    def ask(self, count: int, tokens: int) -> None:
        """Start requests one after the other, until one has to wait for Redis."""
        for _ in range(count):
            request = _of(self.world.limits, tokens)
            if not self.admits(request):
                if self.call is None:
                    self.call = self.lease.call(request, [request] * 3)
                return

    def serve(self, count: int, tokens: int) -> None:
        """Start requests one after the other, with an immediate answer to each call."""
        self.answer()
        for _ in range(count):
            self.ask(1, tokens)
            self.execute()
            self.answer()

    def admits(self, request: LimitRequest) -> bool:
        decision = self.lease.decide(request)
        if decision is None or decision.refused is not None:
            return False
        for quota in decision.quotas.values():
            assert 0 <= quota.used + quota.held <= quota.limit
        world = self.world
        world.admitted.append(world.now)
        world.running.append(_Running(request, self))
        world.check()
        return True

    def execute(self) -> None:
        if self.call is not None and self.numbers is None:
            self.numbers = self.world.script(self.world.now, self.name, self.call)
            assert is_answer(self.call, self.numbers)
            assert count_unfit_fields(self.numbers) == 0

    def answer(self) -> None:
        if self.call is None or self.numbers is None:
            return
        call, grant = self.call, parse_grant(self.call, self.numbers)
        self.call = self.numbers = None
        self.heard = max(self.heard, round((call.sent_at + 1e9) * 1000))
        self.lease.apply(call, grant)
        if call.head is None:
            return
        if grant.refused is not None:
            decision = self.lease.build_refusal(call.head, grant)
            assert decision.wait_ms
        elif self.world.now - self.heard < LEASE_MS:
            assert self.admits(call.head), "it was granted"

    def end(self, count: int, used: int) -> None:
        world = self.world
        mine = [one for one in world.running if one.gateway is self]
        for one in mine[:count]:
            world.running.remove(one)
            request = one.request
            used = min(used, request.tokens)
            if not one.is_lost:
                world.used.append((world.now, used))
            units = {name: request.amount_of(name) for name in request.limits}
            tokens = request.tokens if "tokens_per_minute" in units or request.budgets else 0
            places = request.slots if "concurrent_requests" in units else 0
            self.lease.settle(Settlement(request, tokens, used if tokens else 0, 0, places))
            if request.budgets:
                self.lease.spend(Spending("t", request.budgets, used))
                self.spent += used
        world.check()

    def tick(self) -> None:
        if self.lease.tick() and self.call is None:
            self.call = self.lease.call()

    def lose(self, *, question: bool) -> None:
        """Lose the call or its answer, as on a timeout. The gateway then connects again."""
        if self.call is None:
            return
        if question and self.numbers is None:
            self.world.lost.append((self.name, self.call))
        else:
            self.execute()
        self.call = self.numbers = None
        self.epoch += 1
        self.lease.lose()
        self.world.faults += 1

    def settle_down(self) -> None:
        """End all requests and report to Redis until nothing is left to report."""
        self.execute()
        self.answer()
        self.end(10**6, 1)
        for _ in range(20):
            self.world.now += int(TICK_S * 1000)
            self.tick()
            self.execute()
            self.answer()
        assert self.lease.is_idle


def _of(limits: LimitRequest, tokens: int) -> LimitRequest:
    return LimitRequest(
        tenant="t", limits=limits.limits, budgets=limits.budgets, tokens=tokens, slots=1
    )


def _play(world: _World, step: tuple[str, int, int, int, int, int]) -> None:
    act, number, count, tokens, used, pause = step
    gateway = world.gateways[number]
    if act == "ask":
        gateway.ask(count, tokens)
    elif act == "serve":
        gateway.serve(count, tokens)
    elif act == "execute":
        gateway.execute()
    elif act == "answer":
        gateway.execute()
        gateway.answer()
    elif act == "late answer":
        gateway.execute()
        world.now += pause
        gateway.answer()
    elif act == "end":
        gateway.end(count, used)
    elif act == "tick":
        gateway.tick()
        world.now += int(TICK_S * 1000)
    elif act == "die":
        world.faults += 1
        world.replace(gateway)
    elif act == "a lost question arrives" and world.lost:
        name, call = world.lost.pop(0)
        world.script(world.now, name, call)
        world.lost_arrived += 1
    elif act.startswith("lose"):
        gateway.lose(question=act == "lose the question")
    world.now += pause
    world.check()


@given(LIMIT, LIMIT, LIMIT, st.none() | st.integers(1, 4000), STEPS)
@scale_examples(2, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_minute_has_more_than_the_limit_whatever_is_lost(
    shared_redis: RedisServer,
    requests: int | None,
    tokens: int | None,
    concurrent: int | None,
    day: int | None,
    steps: list[Any],
) -> None:
    limits = limit_request("t", requests=requests, tokens=tokens, concurrent=concurrent, day=day)
    if not limits.limits:
        return
    with shared_redis.client() as client:
        client.flushall()
        world = _World(ScriptAt(client), limits)
        living = [*world.gateways]
        for step in steps:
            _play(world, step)
            living += [one for one in world.gateways if one not in living]
        event(f"leased: {any(any(one.lease._spare) for one in world.gateways)}")
        for gateway in world.gateways:
            gateway.settle_down()
        _check_returned(world, client, living)


def _check_returned(world: _World, client: Any, every: list[_Gateway]) -> None:
    """Assert that Redis counts nothing that no gateway holds, and each budget token once."""
    alive = [b"g:" + one.name.encode() for one in world.gateways]
    # A call that arrives after the end counts until its lease expires.
    assert world.lost_arrived or not [n for n in client.hgetall("limits:{t}") if n in alive]
    if world.limits.budgets:
        fields: Any = client.hgetall("budgets:{t}")
        used = sum([int(value) for name, value in fields.items() if name[:1] == b"d"])
        told = sum([one.spent for one in world.gateways])
        # Gateways that died had reported only a part of what they spent.
        assert told <= used <= sum([one.spent for one in every])
    if not world.faults and world.now < START_MS + WINDOW_MS:
        _check_exact(world, client)
    world.now += FOR_EVER_MS
    most = {n: m for n, m in world.limits.limits.items() if not n.endswith("day")}
    if most:
        limit = min([m for n, m in most.items() if n != "concurrent_requests"], default=1)
        whole = LimitRequest(
            tenant="t",
            limits=most,
            tokens=limit if "tokens_per_minute" in most else 0,
            slots=most.get("concurrent_requests", 0),
        )
        gateway = world.gateways[0]
        call = gateway.lease.call(whole)
        grant = parse_grant(call, world.script(world.now, gateway.name, call))
        assert grant.refused is None, "all of it is free again"


def _check_exact(world: _World, client: Any) -> None:
    """Assert that without faults every unit is counted exactly once."""
    fields: Any = client.hgetall("limits:{t}")
    counted = {
        kind: sum([int(value) for name, value in fields.items() if name[:2] == kind])
        for kind in (b"r:", b"t:")
    }
    if "requests_per_minute" in world.limits.limits:
        assert counted[b"r:"] == len(world.admitted)
    if "tokens_per_minute" in world.limits.limits:
        assert counted[b"t:"] == sum([n for _, n in world.used])
    gateway = world.gateways[0]
    call = gateway.lease.call()
    numbers = world.script(world.now, gateway.name, call)
    gateway.lease.apply(call, parse_grant(call, numbers))
    for report in parse_reports(call, numbers):
        assert report.used == sum([n for _, n in world.used])
