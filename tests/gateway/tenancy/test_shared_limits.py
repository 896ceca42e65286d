"""Limits that gateways count together in Redis: leases, settlements and invalid data."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from redis import Redis

from gateway.tenancy.limits.redis import SharedLimits
from gateway.tenancy.limits.request import Settlement
from tests.support.limit_requests import PATIENT_S, limit_request
from tests.support.redis_server import RedisServer


async def test_a_lease_is_renewed_for_as_long_as_its_request_runs(
    redis_server: RedisServer, at_redis: Redis
) -> None:
    ask = limit_request("t", concurrent=1, day=9, wanted=9)
    async with SharedLimits(redis_server.url, timeout_s=PATIENT_S) as limits:
        decision = await limits.take(ask)
        assert decision is not None
        assert decision.refused is None
        # Redis loses the report of the first gateway. A second gateway must still see its request.
        at_redis.flushall()
        deadline = time.monotonic() + 60
        while not at_redis.exists("limits:{t}"):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        async with SharedLimits(redis_server.url, timeout_s=PATIENT_S) as others:
            second = await others.take(ask)
            assert second is not None
            assert second.refused == "concurrent_requests"
            third = await others.take(limit_request("t", day=9, wanted=1))
            assert third is not None
            assert (third.refused, third.quotas["tokens_per_day"].held) == ("tokens_per_day", 9)
        limits.settle(Settlement(ask, released=9, slots=1))
    assert not [f for f in at_redis.hkeys("limits:{t}") if f.startswith(b"g:")]


async def test_what_is_settled_is_told_before_the_end(
    redis_server: RedisServer, at_redis: Redis
) -> None:
    ask = limit_request("t", tokens=10_000, concurrent=1000, wanted=10)
    async with SharedLimits(redis_server.url, timeout_s=PATIENT_S) as limits:
        taken = [await limits.take(ask) for _ in range(500)]
        for decision in taken:
            assert decision is not None
            limits.settle(Settlement(ask, released=10, used=3, slots=1))
    values: Any = at_redis.hgetall("limits:{t}")
    assert sum(int(value) for field, value in values.items() if field.startswith(b"t:")) == 1500
    assert not [field for field in values if field.startswith(b"g:")]


@pytest.mark.parametrize("steps", [1, 2, 3, 50])
async def test_an_answer_that_nobody_waits_for_is_given_back(
    redis_server: RedisServer, steps: int
) -> None:
    """A call that is cancelled before or during its answer leaves nothing counted."""
    ask = limit_request("t", tokens=9, concurrent=1, day=9, wanted=9)
    async with SharedLimits(redis_server.url, timeout_s=PATIENT_S) as limits:
        for _ in range(20):
            asking = asyncio.ensure_future(limits.take(ask))
            for _ in range(steps):
                await asyncio.sleep(0)
            if not asking.done():
                asking.cancel()
            elif (taken := asking.result()) is not None and taken.refused is None:
                limits.settle(Settlement(ask, released=9, slots=1))
        deadline = time.monotonic() + 60
        while True:
            decision = await limits.take(ask)
            assert decision is not None
            if decision.refused is None:
                break
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)


async def test_scripts_that_redis_forgot_are_sent_again(
    redis_server: RedisServer, at_redis: Redis
) -> None:
    async with SharedLimits(redis_server.url, timeout_s=PATIENT_S) as limits:
        at_redis.script_flush()
        decisions = await asyncio.gather(
            *[limits.take(limit_request("t", requests=5)) for _ in range(9)]
        )
        assert [d is not None and d.refused is None for d in decisions].count(True) == 5


async def test_what_is_wrong_with_one_tenants_key_harms_no_other(
    redis_server: RedisServer, at_redis: Redis
) -> None:
    at_redis.set("limits:{broken}", "not a hash")
    ups: list[bool] = []
    async with SharedLimits(redis_server.url, ups.append, timeout_s=PATIENT_S) as limits:
        for _ in range(3):
            broken, *others = await asyncio.gather(
                limits.take(limit_request("broken", requests=5, concurrent=1)),
                *[limits.take(limit_request(f"t{n}", requests=5, concurrent=1)) for n in range(5)],
            )
            assert broken is None
            assert None not in others
        refused = [decision.refused for decision in others if decision is not None]
        assert refused == ["concurrent_requests"] * 5
        at_redis.delete("limits:{broken}")
        assert await limits.take(limit_request("broken", requests=5, concurrent=1)) is not None
    assert ups == [True]


async def test_a_redis_without_room_is_away_and_no_key_is_blamed(
    redis_server: RedisServer, at_redis: Redis
) -> None:
    ups: list[bool] = []
    blamed: list[bool] = []
    async with SharedLimits(
        redis_server.url, ups.append, on_refused=lambda: blamed.append(True), timeout_s=PATIENT_S
    ) as limits:
        at_redis.config_set("maxmemory", "1")
        assert await limits.take(limit_request("t", requests=5)) is None
        assert ups == [True, False]
        at_redis.config_set("maxmemory", "0")
    assert blamed == []


@pytest.mark.parametrize(
    ("setting", "refusing"), [("min-replicas-to-write", "1"), ("maxmemory", "1")]
)
async def test_a_redis_that_takes_no_writes_stays_away_until_it_does(
    redis_server: RedisServer, at_redis: Redis, setting: str, refusing: str
) -> None:
    ups: list[bool] = []

    def probes() -> int:
        stats = at_redis.info("commandstats")
        return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in _LOADS)

    async with SharedLimits(redis_server.url, ups.append, timeout_s=PATIENT_S) as limits:
        at_redis.config_set(setting, refusing)
        assert await limits.take(limit_request("t", requests=5)) is None
        before = probes()
        async with asyncio.timeout(300):
            while probes() < before + 2:
                assert await limits.take(limit_request("t", requests=5)) is None
                await asyncio.sleep(0.02)
        assert ups == [True, False]
        at_redis.config_set(setting, "0")
        async with asyncio.timeout(300):
            while not limits.up:
                await asyncio.sleep(0.02)
        assert await limits.take(limit_request("t", requests=5)) is not None
    assert ups == [True, False, True]


_LOADS = ("script", "script|load")


WILD: dict[str, str | bytes] = {
    "r:99999999999": "1",  # the script would step through all seconds up to this one
    "t:99999999999999999999": "1",
    "r:": "1",
    "r:1e9": "1",
    "t:-1": "1",
    "g:other": " ".join(["9" * 40] * 10),
    "g:another": "nan inf",
    "g:third": "1 2 3",
    "w": "nan",
    "x": "y",
    "": "",
    b"\xff": b"\xff",  # type: ignore[dict-item]
}


async def test_what_others_write_into_a_tenants_key_is_left_alone(
    redis_server: RedisServer, at_redis: Redis
) -> None:
    key = "limits:{wild}"
    second = at_redis.time()[0]
    wild = {**WILD, f"t:{second + 30}": "nan", f"r:{second - 1}": "-5"}
    at_redis.hset(key, mapping=wild)
    refused: list[None] = []
    async with SharedLimits(
        redis_server.url, timeout_s=PATIENT_S, on_refused=lambda: refused.append(None)
    ) as limits:
        for _ in range(2):
            decisions = [
                await limits.take(
                    limit_request("wild", requests=2, tokens=100, concurrent=3, wanted=10)
                )
                for _ in range(2)
            ]
        numbers = [d for d in decisions if d is not None]
        assert [d.refused for d in numbers] == ["requests_per_minute"] * 2
        assert all(
            0 < d.wait_ms <= 62_000 and d.quotas["tokens_per_minute"].remaining == 80
            for d in numbers
        )
    kept = at_redis.hgetall(key)
    names = [name if isinstance(name, bytes) else name.encode() for name in wild]
    assert all(name in kept for name in names), "left alone"
    assert len(refused) == 1, "counted once"
