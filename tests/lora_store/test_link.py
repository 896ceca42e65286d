"""Calls to a silent Redis through `Link`."""

from __future__ import annotations

import asyncio
import signal

from adapters.errors import StoreUnavailable
from lora_store.link import Link
from lora_store.redis import Position, RedisTier
from lora_store.stats import StoreStats
from tests.support.redis_server import RedisServer

THREADS = 4
CALLS = 40


async def test_who_queued_behind_a_silent_redis_does_not_ask_it_too(
    redis_server: RedisServer,
) -> None:
    asked = 0

    def ask(redis: RedisTier) -> Position:
        nonlocal asked
        asked += 1
        return redis.position()

    link = Link(RedisTier(redis_server.settings(timeout_s=5.0)), StoreStats())
    assert await link.probe(RedisTier.position) == (None, None)
    redis_server.signal(signal.SIGSTOP)
    calls = [link.call(ask) for _ in range(CALLS)]
    ends = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(end) for end in ends} == {StoreUnavailable}
    assert asked <= THREADS
    redis_server.signal(signal.SIGCONT)
    while await link.probe(RedisTier.position) is None:
        pass
    assert await link.call(ask) == (None, None)
    await link.close()
