"""Startup of a gateway with 500 adapters, which sends only what Redis lacks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from lora_store import names
from lora_store import tiered as tiered_module
from lora_store.disk import Disk
from lora_store.redis import RedisSettings, RedisTier
from tests.support.adapter_store import StoreGateway, becomes, gateway, record
from tests.support.lora_files import content
from tests.support.redis_cost import MAX_CALL_US, longest_call_us
from tests.support.redis_server import RedisServer

_ADAPTERS = 500
_LONG_AGO_NS = 10**18


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    """Return a disk tier that stores all adapters and was last written to long ago."""
    disk = Disk(tmp_path)
    for number in range(1, _ADAPTERS + 1):
        disk.put(content(number))
        disk.put_record(record(f"a{number}", number))
    os.utime(tmp_path / "names", ns=(_LONG_AGO_NS, _LONG_AGO_NS))
    return disk


def _calls(at_redis: redis.Redis, *commands: str) -> int:
    found = at_redis.info("commandstats")
    return sum([found.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in commands])


def _versions(at_redis: redis.Redis) -> int:
    keys = at_redis.scan_iter("lora:version:*", count=10_000)
    return sum([key.count(b":") == 2 for key in keys])


def _is_level(one: StoreGateway) -> bool:
    """Return True if the first upkeep has finished: it sent what Redis lacks, or Redis was full."""
    return not one.store._redis_started_over


async def test_a_start_sends_what_redis_lacks_alone(
    disk: Disk, redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    async with gateway(tmp_path, redis_server) as one:
        await becomes(lambda: _is_level(one) and _versions(at_redis) == _ADAPTERS)
    assert at_redis.hlen("lora:names") == _ADAPTERS + 2
    stored = sum([len(content(n).weights) for n in range(1, _ADAPTERS + 1)])
    # Make three differences: one version is missing, one is unreadable, and one record is older in
    # Redis.
    at_redis.delete(f"lora:version:{content(7).digest}")
    at_redis.set(f"lora:version:{content(8).digest}", "what nobody can read")
    disk.put_record(replace(record("a9", 9), revision=2, updated=2.0))
    at_redis.config_resetstat()
    async with gateway(tmp_path, redis_server) as one:
        await becomes(lambda: _is_level(one) and _calls(at_redis, "hincrby") == 1)
        assert one.store.stats.refilled == 2
        assert one.store.stats.unsent == 0
    assert _versions(at_redis) == _ADAPTERS
    # Each of the two versions takes three SETs: a claim, a chunk and the description. The record
    # takes one script call.
    assert (_calls(at_redis, "set"), _calls(at_redis, "eval")) == (6, 1)
    stats = at_redis.info("stats")
    assert stats["total_net_input_bytes"] < stored / 10
    assert stats["total_reads_processed"] < _ADAPTERS / 2, "they are asked for one by one"


async def test_a_full_redis_is_sent_nothing_until_it_has_room(
    disk: Disk,
    redis_server: RedisServer,
    at_redis: redis.Redis,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store reads nothing from the disk and compares contents once while Redis is full."""
    monkeypatch.setattr(tiered_module, "_RETRY_S", 3600.0)
    at_redis.config_set("maxmemory", 1)
    async with gateway(tmp_path, redis_server, poll_s=0.01) as one:
        await becomes(lambda: one.store.stats.unsent == _ADAPTERS)
        syncs, looked = one.store.stats.syncs, _calls(at_redis, "hmget")
        await becomes(lambda: _calls(at_redis, "hmget") > looked + 20)
        assert one.store.stats.syncs == syncs == 1
        assert one.store.stats.disk_hits == 0
        assert _calls(at_redis, "eval") == 1, "one record is refused, and the others are not tried"
        assert one.store.is_shared(record("a1", 1)) is False
        assert one.serves("a499") == content(499).digest
    monkeypatch.setattr(tiered_module, "_RETRY_S", 0.1)
    async with gateway(tmp_path, redis_server, poll_s=0.05) as one:
        await becomes(lambda: one.store.stats.unsent == _ADAPTERS)
        at_redis.config_set("maxmemory", 0)
        await becomes(lambda: one.store.stats.unsent == 0)
        await becomes(lambda: one.store.is_shared(record("a1", 1)))
    assert _versions(at_redis) == _ADAPTERS
    assert at_redis.hlen("lora:names") == _ADAPTERS + 2


async def test_a_redis_that_drops_what_is_old_is_filled_and_no_more(
    disk: Disk, redis_server: RedisServer, at_redis: redis.Redis, tmp_path: Path
) -> None:
    """An evicting Redis is filled, but nothing is evicted: the next start would send it again."""
    at_redis.config_set("maxmemory-policy", "allkeys-lru")
    at_redis.config_set("maxmemory", at_redis.info("memory")["used_memory"] + 4 * 2**20)
    for _ in range(2):
        async with gateway(tmp_path, redis_server) as one:
            await becomes(lambda one=one: _is_level(one) and one.store.stats.syncs)
            assert one.store.stats.unsent == 0
    assert 0 < _versions(at_redis) < _ADAPTERS
    assert at_redis.info("stats")["evicted_keys"] == 0


def test_records_that_were_read_before_are_not_parsed_again(
    disk: Disk, tier: RedisTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    names.sync(disk, tier, {})
    parsed: list[str] = []

    def read(name: str, raw: bytes) -> object:
        parsed.append(name)
        return record(name, int(name[1:]))

    monkeypatch.setattr("lora_store.redis.read_record", read)
    _, same = tier.records({})
    assert len(parsed) == _ADAPTERS
    assert tier.records({}) == tier.records({})
    assert len(parsed) == _ADAPTERS
    changed = replace(record("a1", 1), revision=2)
    assert tier.swap(same["a1"], changed)
    tier.records({})
    assert parsed[_ADAPTERS:] == ["a1"]


def test_no_call_of_a_store_of_10_000_adapters_takes_long(
    shared_redis: RedisServer, at_shared_redis: redis.Redis
) -> None:
    tier = RedisTier(RedisSettings(shared_redis.url, timeout_s=30))
    many = [record(f"tenant/adapter-{n}", 1 + n % 50) for n in range(10_000)]
    versions = {each.versions[0].weights for each in many}
    large = content(1, nbytes=64 * 2**20)

    def prepare(run: int) -> None:
        if run == 0:
            for start in range(0, len(many), 500):
                pipeline = at_shared_redis.pipeline(transaction=False)
                for each in many[start : start + 500]:
                    raw = b'{"padded":"%b"}' % (b"x" * 1500)
                    pipeline.hset("lora:names", each.name, raw)
                    pipeline.set(f"lora:version:{each.name.encode().hex().zfill(64)[:64]}", "1 1 1")
                pipeline.execute()

    def work(run: int) -> None:
        assert len(tier.records()[1]) == len(many)
        tier.has([*versions, *[f"{n:064x}" for n in range(10_000)]])
        tier.digests(0.0)
        tier.put(large)
        assert sum(map(len, tier.fetch(large.digest) or ())) > large.nbytes
        tier.delete(large.digest)
        tier.free_bytes()

    assert longest_call_us(at_shared_redis, prepare, work) < MAX_CALL_US
    tier.close()
