"""Many queued requests of one tenant, while Redis answers each call in time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.tenancy.limits import redis
from gateway.tenancy.limits.script import ScriptCall
from tests.support.limit_requests import limit_request

REQUESTS = 200
ANSWERED_WITHIN_S = 0.004


class SlowScript:
    """A fake script caller, whose answer after 4 ms is that no tokens are left.

    `may_return` is 1 in the answer if other gateways have spare tokens.
    """

    def __init__(self, url: str, timeout_s: float, **callbacks: Any) -> None:
        self.epoch = 0
        self.up = True
        self.may_return = False
        self._on_answers = callbacks["on_answers"]

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def submit(self, call: ScriptCall) -> bool:
        refused = int(call.head is not None)
        numbers = [refused, 1000 * refused, 0, 0, self.may_return * refused]
        numbers += [0, 0, 0, 0, 0, 0, 1000, 0, 60_000]
        loop = asyncio.get_running_loop()
        loop.call_later(ANSWERED_WITHIN_S, self._on_answers, [(call, numbers)])
        return True

    def set_late(self, is_late: bool) -> None:
        self.up = not is_late


@pytest.mark.parametrize("may_return", [False, True])
async def test_who_waits_behind_many_is_still_counted_in_redis(
    monkeypatch: pytest.MonkeyPatch, may_return: bool
) -> None:
    """All calls together take longer than the time limit of one call, but Redis stays in use."""
    monkeypatch.setattr(redis, "ScriptCaller", SlowScript)
    async with redis.SharedLimits("redis://unused") as limits:
        limits._caller.may_return = may_return  # type: ignore[attr-defined]
        asked = [
            limits.take(limit_request("t", tokens=1000, wanted=wanted))
            for wanted in range(1, 1 + REQUESTS)
        ]
        decisions = await asyncio.gather(*asked)
        assert limits.up
    assert {each and each.refused for each in decisions} == {"tokens_per_minute"}
