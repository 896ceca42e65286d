"""The Redis tier of the adapter store, tested against a real redis-server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import redis

from adapters.errors import StoreError, StoreUnavailable
from adapters.record import Record
from lora_store.codec import decode
from lora_store.redis import RedisSettings, RedisTier
from lora_store.redis_values import StoredRecord, dump
from tests.support.adapter_store import becomes, record
from tests.support.lora_files import content
from tests.support.redis_server import RedisServer


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """Return a client to inspect, damage and empty the server's data."""
    with redis_server.client() as client:
        yield client


@contextlib.contextmanager
def open_tier(settings: RedisSettings) -> Iterator[RedisTier]:
    with contextlib.closing(RedisTier(settings)) as tier:
        yield tier


@pytest.fixture
def tier(redis_server: RedisServer) -> Iterator[RedisTier]:
    with open_tier(redis_server.settings()) as tier:
        yield tier


async def subscribed(client: redis.Redis) -> None:
    """Wait until one client has subscribed to the channel of changes."""
    await becomes(lambda: client.pubsub_numsub("lora:changes") == [(b"lora:changes", 1)])


def _stored(known: Record) -> StoredRecord:
    return StoredRecord(dump(known), known)


def _fetched(tier: RedisTier, number: int) -> bytes:
    chunks = tier.fetch(content(number).digest)
    assert chunks is not None
    return b"".join(chunks)


def test_a_version_goes_and_comes_in_chunks(client: redis.Redis, tier: RedisTier) -> None:
    big = content(1, 5 * 1024 * 1024 // 2)
    tier.put(big)
    chunks = tier.fetch(big.digest)
    assert chunks is not None
    parts = list(chunks)
    assert [len(part) for part in parts[:-1]] == [1024 * 1024] * 2
    assert bytes(decode(b"".join(parts), big.digest).weights) == bytes(big.weights)
    longest = max(client.strlen(key) for key in client.scan_iter("lora:version:*"))
    assert longest == 1024 * 1024
    assert tier.has([big.digest, content(2).digest]) == {big.digest}


def test_absent_and_deleted(client: redis.Redis, tier: RedisTier) -> None:
    assert tier.fetch(content(1).digest) is None
    tier.put(content(1))
    tier.delete(content(1).digest)
    tier.delete(content(1).digest)
    assert tier.fetch(content(1).digest) is None
    assert client.dbsize() == 0


def test_a_chunk_that_redis_evicted_makes_the_version_absent(
    client: redis.Redis, tier: RedisTier
) -> None:
    tier.put(content(1))
    client.delete(f"lora:version:{content(1).digest}:0")
    with pytest.raises(StoreError, match="gone"):
        _fetched(tier, 1)
    assert tier.fetch(content(1).digest) is None
    assert tier.has([content(1).digest]) == set()


def test_time_to_live_starts_again_with_each_use(
    redis_server: RedisServer, client: redis.Redis
) -> None:
    with open_tier(redis_server.settings(ttl_s=100)) as tier:
        tier.put(content(1))
        keys = list(client.scan_iter("lora:version:*"))
        assert len(keys) == 2
        for key in keys:
            assert 0 < client.ttl(key) <= 100
            client.expire(key, 10)
        _fetched(tier, 1)
        assert all(client.ttl(key) > 10 for key in keys)
        tier.swap(None, record())
        assert client.ttl("lora:names") == -1


def test_putting_again_makes_it_young(client: redis.Redis, tier: RedisTier) -> None:
    digest = content(1).digest
    tier.put(content(1))
    assert tier.digests(older_than_s=-1) == {digest}
    assert tier.digests(older_than_s=60) == set()
    size, chunk, _ = client.get(f"lora:version:{digest}").split()
    client.set(f"lora:version:{digest}", b"%s %s 1" % (size, chunk))
    assert tier.digests(older_than_s=60) == {digest}
    tier.put(content(1))
    assert tier.digests(older_than_s=60) == set()


def test_swap_only_what_was_expected(tier: RedisTier) -> None:
    one, other = record(), replace(record(), revision=2)
    assert tier.position() == (None, None)
    assert tier.swap(None, one)
    before = tier.position()
    assert not tier.swap(None, other)
    assert not tier.swap(_stored(other), other)
    assert tier.position() == before
    assert tier.swap(_stored(one), other)
    epoch, revision = tier.position()
    assert epoch == before[0] is not None
    assert revision != before[1]
    assert tier.record("zh") == _stored(other)
    assert tier.records() == ((epoch, revision), {"zh": _stored(other)})


def test_servers_that_took_different_changes_do_not_look_alike(
    client: redis.Redis, tier: RedisTier
) -> None:
    """Positions differ if a new primary lost the last change and then took another one."""
    one, other = record(), replace(record(), revision=2)
    tier.swap(None, one)
    copy = client.dump("lora:names")
    tier.swap(_stored(one), other)
    lost = tier.position()
    client.restore("lora:names", 0, copy, replace=True)
    tier.swap(_stored(one), replace(other, updated=2.0))
    assert tier.position()[0] == lost[0]
    assert tier.position()[1] != lost[1]


def test_the_epoch_tells_that_all_was_lost(client: redis.Redis, tier: RedisTier) -> None:
    tier.swap(None, record())
    before = tier.position()
    client.flushall()
    assert tier.position() == (None, None)
    tier.swap(None, record())
    assert tier.position()[0] not in (None, before[0])


def test_no_change_is_lost_between_gateways(redis_server: RedisServer, tier: RedisTier) -> None:
    def change(times: int) -> None:
        with open_tier(redis_server.settings()) as mine:
            while times:
                stored = mine.record("zh")
                known = stored and stored.record
                new = record() if known is None else replace(known, revision=known.revision + 1)
                times -= mine.swap(stored, new)

    threads = [threading.Thread(target=change, args=(50,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = tier.record("zh")
    assert found is not None
    assert found.record is not None
    assert found.record.revision == 200


def test_one_claim_at_a_time(tier: RedisTier) -> None:
    assert tier.claim("d")
    assert not tier.claim("d")
    tier.release("d")
    assert tier.claim("d")


async def test_listeners_hear_changes_and_wishes(tier: RedisTier, client: redis.Redis) -> None:
    async with contextlib.aclosing(tier.listen()) as messages:
        first = asyncio.ensure_future(anext(messages))
        await subscribed(client)
        tier.swap(None, record())
        tier.want("abc")
        assert await first == "changed"
        assert await anext(messages) == "wanted abc"


async def test_gone_and_back(
    redis_server: RedisServer, tier: RedisTier, client: redis.Redis
) -> None:
    tier.put(content(1))
    async with contextlib.aclosing(tier.listen()) as messages:
        listener = asyncio.ensure_future(anext(messages))
        await subscribed(client)
        redis_server.kill()
        with pytest.raises(StoreUnavailable):
            await listener
    with pytest.raises(StoreUnavailable):
        tier.position()
    with pytest.raises(StoreUnavailable):
        tier.put(content(1))
    redis_server.start()
    assert tier.fetch(content(1).digest) is None
    tier.put(content(1))
    assert tier.swap(None, record())
    assert decode(_fetched(tier, 1), content(1).digest)


def test_a_redis_that_hangs_is_unavailable_after_the_timeout(redis_server: RedisServer) -> None:
    with open_tier(redis_server.settings(timeout_s=8.0)) as tier:
        tier.position()
        redis_server.signal(signal.SIGSTOP)
        with pytest.raises(StoreUnavailable):
            tier.position()
        redis_server.signal(signal.SIGCONT)
        with redis_server.client() as patient:
            # Wait with a client without a short timeout: after SIGCONT Redis may answer late.
            patient.ping()
        assert tier.position() == (None, None)


async def test_who_would_listen_to_a_redis_that_hangs_is_told_so(redis_server: RedisServer) -> None:
    """Listening to a Redis that accepts the connection, but never answers, raises an error."""
    redis_server.kill()
    with redis_server.silent(), open_tier(redis_server.settings(timeout_s=0.3)) as tier:
        async with contextlib.aclosing(tier.listen()) as messages:
            with pytest.raises(StoreUnavailable):
                await anext(messages)


def test_a_full_redis_refuses_and_stays_usable(client: redis.Redis, tier: RedisTier) -> None:
    client.config_set("maxmemory", 5 * 1024 * 1024)
    try:
        with pytest.raises(StoreError, match="refuses") as caught:
            tier.put(content(1, 30 * 1024 * 1024))
        assert not isinstance(caught.value, StoreUnavailable)
        assert tier.fetch(content(1, 30 * 1024 * 1024).digest) is None
        assert tier.position() == (None, None)
    finally:
        client.config_set("maxmemory", 0)
