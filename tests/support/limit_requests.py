"""Requests against a tenant's limits, with few arguments and a test clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from redis import Redis

from gateway.config.limits import LIMITS, LimitName
from gateway.tenancy.limits.lease import Lease
from gateway.tenancy.limits.request import Decision, LimitRequest
from gateway.tenancy.limits.script import (
    SCRIPT,
    ScriptCall,
    count_unfit_fields,
    is_answer,
    parse_grant,
)

PATIENT_S = 30.0
"""Redis timeout in seconds for tests of counts. No machine is so busy that it is reached."""


def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.02)


def limit_request(
    tenant: str,
    *,
    requests: int | None = None,
    tokens: int | None = None,
    concurrent: int | None = None,
    day: int | None = None,
    month: int | None = None,
    wanted: int = 0,
    places: int = 1,
) -> LimitRequest:
    """Return a request for `wanted` tokens and `places` slots, under the given limits."""
    limits: dict[LimitName, int | None] = {
        "requests_per_minute": requests,
        "tokens_per_minute": tokens,
        "concurrent_requests": concurrent,
        "tokens_per_day": day,
        "tokens_per_month": month,
    }
    given = {name: limit for name, limit in limits.items() if limit is not None}
    budgets = {name: limit for name, limit in given.items() if LIMITS[name].budget}
    return LimitRequest(tenant=tenant, limits=given, budgets=budgets, tokens=wanted, slots=places)


class ScriptAt:
    """The Lua script of the limits, with a clock that the test sets."""

    def __init__(self, client: Redis) -> None:
        assert SCRIPT.count("redis.call('TIME')") == 1
        clock = (
            "{ math.floor(redis.call('GET', 'ms') / 1000), redis.call('GET', 'ms') % 1000 * 1000 }"
        )
        self._client: Any = client
        self._sha = self._client.script_load(SCRIPT.replace("redis.call('TIME')", clock))

    def __call__(
        self, now_ms: int, gateway: str, call: ScriptCall, lease_ms: int = 15_000
    ) -> list[int]:
        self._client.set("ms", now_ms)
        answer: list[int] = self._client.execute_command(
            *call.command(self._sha, gateway, lease_ms)
        )
        return answer


class LeaseAt:
    """A gateway process' lease that calls the script directly, with the test's clock."""

    def __init__(self, script: ScriptAt, gateway: str, now_ms: Callable[[], int]) -> None:
        self.lease = Lease("t", lambda: now_ms() / 1000)
        self._script = script
        self._gateway = gateway
        self._now_ms = now_ms

    def take(self, request: LimitRequest) -> Decision:
        while (decision := self.lease.decide(request)) is None:
            call = self.lease.call(request)
            numbers = self._ask(call)
            grant = parse_grant(call, numbers)
            self.lease.apply(call, grant)
            if grant.refused is not None:
                return self.lease.build_refusal(request, grant)
        return decision

    def report(self) -> None:
        """Report the usage, and return unused quota."""
        self.lease.tick()
        call = self.lease.call()
        self.lease.apply(call, parse_grant(call, self._ask(call)))

    def _ask(self, call: ScriptCall) -> list[int]:
        numbers = self._script(self._now_ms(), self._gateway, call)
        assert is_answer(call, numbers)
        assert count_unfit_fields(numbers) == 0
        return numbers
