"""The shared tier against a real redis-server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from adapters.errors import StoreError, StoreUnavailable
from lora_store.codec import decode
from lora_store.redis import RedisTier, dump, parse
from tests.lora_store.test_disk import record
from tests.support.lora_files import content
from tests.support.redis_server import RedisServer, running_redis

pytestmark = pytest.mark.timed


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RedisTier]:
    server.client().flushall()
    tier = server.tier()
    yield tier
    tier.close()


def _fetched(tier: RedisTier, number: int) -> bytes:
    chunks = tier.fetch(content(number).digest)
    assert chunks is not None
    return b"".join(chunks)


def test_a_version_goes_and_comes_in_chunks(server: RedisServer, tier: RedisTier) -> None:
    big = content(1, 5 * 1024 * 1024 // 2)
    tier.put(big)
    chunks = tier.fetch(big.digest)
    assert chunks is not None
    parts = list(chunks)
    assert [len(part) for part in parts[:-1]] == [1024 * 1024] * 2
    assert bytes(decode(memoryview(b"".join(parts)), big.digest).weights) == bytes(big.weights)
    longest = max(
        server.client().strlen(key) for key in server.client().scan_iter("lora:version:*")
    )
    assert longest == 1024 * 1024
    assert tier.has([big.digest, content(2).digest]) == {big.digest}


def test_absent_and_deleted(server: RedisServer, tier: RedisTier) -> None:
    assert tier.fetch(content(1).digest) is None
    tier.put(content(1))
    tier.delete(content(1).digest)
    tier.delete(content(1).digest)
    assert tier.fetch(content(1).digest) is None
    assert server.client().dbsize() == 0


def test_a_chunk_that_redis_evicted_makes_the_version_absent(
    server: RedisServer, tier: RedisTier
) -> None:
    tier.put(content(1))
    server.client().delete(f"lora:version:{content(1).digest}:0")
    with pytest.raises(StoreError, match="gone"):
        _fetched(tier, 1)
    assert tier.fetch(content(1).digest) is None
    assert tier.has([content(1).digest]) == set()


def test_time_to_live_starts_again_with_each_use(server: RedisServer) -> None:
    server.client().flushall()
    tier = server.tier(ttl_s=100)
    tier.put(content(1))
    keys = list(server.client().scan_iter("lora:version:*"))
    assert len(keys) == 2
    for key in keys:
        assert 0 < server.client().ttl(key) <= 100
        server.client().expire(key, 10)
    _fetched(tier, 1)
    assert all(server.client().ttl(key) > 10 for key in keys)
    tier.swap(None, record())
    assert server.client().ttl("lora:names") == -1
    tier.close()


def test_putting_again_makes_it_young(server: RedisServer, tier: RedisTier) -> None:
    digest = content(1).digest
    tier.put(content(1))
    assert tier.digests(older_than_s=-1) == {digest}
    assert tier.digests(older_than_s=60) == set()
    size, chunk, _ = server.client().get(f"lora:version:{digest}").split()
    server.client().set(f"lora:version:{digest}", b"%s %s 1" % (size, chunk))
    assert tier.digests(older_than_s=60) == {digest}
    tier.put(content(1))
    assert tier.digests(older_than_s=60) == set()


def test_swap_only_what_was_expected(tier: RedisTier) -> None:
    one, other = record(), replace(record(), revision=2)
    assert tier.position() == (None, None)
    assert tier.swap(None, one)
    assert not tier.swap(None, other)
    assert not tier.swap(dump(other), other)
    assert tier.swap(dump(one), other)
    epoch, revision = tier.position()
    assert epoch
    assert revision == b"2"
    assert parse(tier.record("zh")) == other
    assert tier.records() == ((epoch, b"2"), {"zh": dump(other)})


def test_the_epoch_tells_that_all_was_lost(server: RedisServer, tier: RedisTier) -> None:
    tier.swap(None, record())
    before = tier.position()
    server.client().flushall()
    assert tier.position() == (None, None)
    tier.swap(None, record())
    assert tier.position()[1] == before[1]
    assert tier.position()[0] != before[0]


def test_no_change_is_lost_between_gateways(server: RedisServer, tier: RedisTier) -> None:
    def change(times: int) -> None:
        mine = server.tier()
        while times:
            stored = mine.record("zh")
            known = parse(stored)
            new = record() if known is None else replace(known, revision=known.revision + 1)
            times -= mine.swap(stored, new)
        mine.close()

    threads = [threading.Thread(target=change, args=(50,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = parse(tier.record("zh"))
    assert found is not None
    assert found.revision == 200
    assert tier.position()[1] == b"200"


@pytest.mark.parametrize("junk", [b"", b"{}", b"[]", b"\xff", b'{"name": 1}'])
def test_junk_is_no_record(junk: bytes) -> None:
    assert parse(junk) is None


def test_one_claim_at_a_time(tier: RedisTier) -> None:
    assert tier.claim("d")
    assert not tier.claim("d")
    tier.release("d")
    assert tier.claim("d")


async def test_listeners_hear_changes_and_wishes(tier: RedisTier, server: RedisServer) -> None:
    heard: asyncio.Queue[str] = asyncio.Queue()

    async def listen() -> None:
        async with contextlib.aclosing(tier.listen()) as messages:
            async for message in messages:
                heard.put_nowait(message)

    task = asyncio.create_task(listen())
    while not server.client().pubsub_numsub("lora:changes")[0][1]:
        await asyncio.sleep(0.01)
    tier.swap(None, record())
    tier.want("abc")
    assert await asyncio.wait_for(heard.get(), 1) == "changed"
    assert await asyncio.wait_for(heard.get(), 1) == "wanted abc"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_gone_and_back() -> None:
    with running_redis() as server:
        tier = server.tier()
        tier.put(content(1))
        listener = asyncio.create_task(anext(tier.listen()))
        await asyncio.sleep(0.2)
        server.kill()
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(listener, 1)
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            tier.position()
        with pytest.raises(StoreUnavailable):
            tier.put(content(1))
        assert time.monotonic() - started < 0.5
        server.start()
        assert tier.fetch(content(1).digest) is None
        tier.put(content(1))
        assert tier.swap(None, record())
        assert decode(memoryview(_fetched(tier, 1)), content(1).digest)
        tier.close()


def test_a_redis_that_hangs_is_unavailable_after_the_timeout(server: RedisServer) -> None:
    tier = server.tier(timeout_s=0.3)
    tier.position()
    server.signal(signal.SIGSTOP)
    try:
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            tier.position()
        assert 0.2 < time.monotonic() - started < 1.0
    finally:
        server.signal(signal.SIGCONT)
    assert tier.position() == tier.position()
    tier.close()


def test_a_full_redis_refuses_and_stays_usable(server: RedisServer, tier: RedisTier) -> None:
    server.client().config_set("maxmemory", 5 * 1024 * 1024)
    try:
        with pytest.raises(StoreError, match="refuses") as caught:
            tier.put(content(1, 30 * 1024 * 1024))
        assert not isinstance(caught.value, StoreUnavailable)
        assert tier.fetch(content(1, 30 * 1024 * 1024).digest) is None
        assert tier.position() == (None, None)
    finally:
        server.client().config_set("maxmemory", 0)
