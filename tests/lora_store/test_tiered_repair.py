"""Repairs of adapter copies and records that are damaged, missing, old or in conflict."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from adapters.errors import VersionUnavailable
from lora_store import versions
from lora_store.disk import Disk
from lora_store.redis import RedisTier
from tests.support.adapter_store import (
    becomes,
    copies,
    gateway,
    listening,
    overwrite,
    record,
    version_file,
)
from tests.support.full_disk import full_disk
from tests.support.lora_files import content
from tests.support.redis_server import RedisServer

Damage = Callable[[Path], None]


def _truncate(path: Path) -> None:
    os.truncate(path, 5000)


DAMAGES = [overwrite, _truncate]


@pytest.mark.parametrize("how", ["flushall", "kill"])
async def test_an_emptied_redis_is_refilled_and_nothing_is_lost(
    tmp_path: Path,
    redis_server: RedisServer,
    how: str,
    at_redis: redis.Redis,
    tier: RedisTier,
) -> None:
    async with gateway(tmp_path / "a", redis_server) as one:
        for number in range(5):
            await one.add(f"a{number}", number)
        await one.registry.remove("a0")
        if how == "flushall":
            at_redis.flushall()
        else:
            redis_server.kill()
            redis_server.start()
        live = [content(number).digest for number in range(1, 5)]
        await becomes(lambda: tier.has(live) == set(live))
        async with gateway(tmp_path / "b", redis_server) as other:
            assert [other.serves(f"a{n}") for n in range(5)] == [None, *live]
            assert all([await other.holds(number) for number in range(1, 5)])


async def test_a_version_that_redis_dropped_is_asked_for(
    tmp_path: Path,
    redis_server: RedisServer,
    at_redis: redis.Redis,
) -> None:
    """A version whose chunk Redis expired or evicted is fetched from another gateway."""
    async with gateway(tmp_path / "a", redis_server) as one:
        await one.add("zh", 1)
        await listening(redis_server, 1)
        at_redis.delete(f"lora:version:{content(1).digest}:0")
        async with gateway(tmp_path / "b", redis_server) as other:
            assert await other.holds(1)
            assert other.store.stats.redis_misses == 1
            # Two refills are possible: the upkeep may have noticed the missing chunk at the same
            # time.
            await becomes(lambda: one.store.stats.refilled >= 1)


async def test_a_damaged_disk_copy_is_replaced_from_redis(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with gateway(tmp_path, redis_server) as one:
        await one.add("zh", 1)
    path = version_file(tmp_path, content(1).digest)
    path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    async with gateway(tmp_path, redis_server) as again:
        assert await again.holds(1)
        assert again.store.stats.corrupt_copies == 1
    assert Disk(tmp_path).get(content(1).digest)
    assert (tmp_path / "quarantine" / path.name).exists()


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_copy_damaged_while_it_is_served_is_mended_from_memory(
    tmp_path: Path, damage: Damage
) -> None:
    digest = content(1).digest
    async with gateway(tmp_path, None) as one:
        await one.add("zh", 1)
        damage(version_file(tmp_path, digest))
        assert await one.holds(1)
        assert one.store.stats.corrupt_copies == 1
        assert (tmp_path / "quarantine" / f"{digest}.lora").exists()
        assert Disk(tmp_path).get(digest)
        assert await one.holds(1)
        assert one.store.stats.corrupt_copies == 1


@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_damaged_copy_is_served_from_memory_where_the_disk_is_full(
    tmp_path: Path, damage: Damage
) -> None:
    async with gateway(tmp_path, None) as one:
        await one.add("zh", 1)
        damage(version_file(tmp_path, content(1).digest))
        with full_disk(2048):
            assert await one.holds(1)
            assert await one.holds(1)
        assert one.store.stats.corrupt_copies == 1
        assert copies(tmp_path) == set()
        await one.store.verify(content(1).digest)
        assert copies(tmp_path) == {content(1).digest}


@pytest.mark.parametrize("redis_too", [False, True])
async def test_a_copy_that_cannot_be_read_is_replaced(
    tmp_path: Path, redis_server: RedisServer, redis_too: bool
) -> None:
    """A copy is replaced if reads of its file fail with EIO, as on a disk with bad sectors."""
    memory_bytes = 0 if redis_too else 2**20
    server = redis_server if redis_too else None
    async with gateway(tmp_path, server, memory_bytes=memory_bytes) as one:
        await one.add("zh", 1)
        path = version_file(tmp_path, content(1).digest)
        path.unlink()
        path.symlink_to("/proc/self/mem")
        with path.open("rb") as file, pytest.raises(OSError, match="Input/output error"):
            file.read(1)
        assert await one.holds(1)
        assert not path.is_symlink()
        assert Disk(tmp_path).get(content(1).digest)


@pytest.mark.parametrize("redis_too", [False, True])
async def test_verify_finds_what_no_time_or_size_tells(
    tmp_path: Path, redis_server: RedisServer, redis_too: bool
) -> None:
    digest = content(1).digest
    memory_bytes = 0 if redis_too else 2**20
    server = redis_server if redis_too else None
    async with gateway(tmp_path, server, memory_bytes=memory_bytes) as one:
        await one.add("zh", 1)
        path = version_file(tmp_path, digest)
        before = path.stat()
        overwrite(path)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        await one.store.verify(digest)
        assert one.store.stats.corrupt_copies == 1
        assert Disk(tmp_path).get(digest)
        assert await one.holds(1)
        assert one.store.stats.corrupt_copies == 1


async def test_a_damaged_copy_in_redis_is_replaced_from_a_disk(
    tmp_path: Path,
    redis_server: RedisServer,
    at_redis: redis.Redis,
) -> None:
    async with gateway(tmp_path / "a", redis_server) as one:
        await one.add("zh", 1)
        await listening(redis_server, 1)
        at_redis.setrange(f"lora:version:{content(1).digest}:0", 5000, b"\x00\x01\x02")
        async with gateway(tmp_path / "b", redis_server) as other:
            assert await other.holds(1)
            assert other.store.stats.corrupt_copies == 1


async def test_no_intact_copy_anywhere_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    redis_server: RedisServer,
    at_redis: redis.Redis,
) -> None:
    async with gateway(tmp_path, redis_server) as one:
        await one.add("zh", 1)
    version_file(tmp_path, content(1).digest).write_bytes(b"junk")
    at_redis.delete(f"lora:version:{content(1).digest}")
    async with gateway(tmp_path, redis_server) as again:
        monkeypatch.setattr(versions, "_REFILL_TIMEOUT_S", 0.1)
        with pytest.raises(VersionUnavailable, match=content(1).digest[:12]) as caught:
            await again.store.get(content(1).digest)
        assert caught.value.digest == content(1).digest
        await again.add("zh", 1)
        assert await again.holds(1)


async def test_an_old_disk_does_not_bring_a_removed_adapter_back(
    tmp_path: Path,
    redis_server: RedisServer,
    at_redis: redis.Redis,
) -> None:
    async with gateway(tmp_path / "a", redis_server) as one:
        await one.add("zh", 1)
        async with gateway(tmp_path / "b", redis_server) as other:
            assert other.serves("zh")
        await one.registry.remove("zh")
        at_redis.flushall()
        async with gateway(tmp_path / "b", redis_server) as other:
            await becomes(lambda: other.serves("zh") is None)
        assert one.serves("zh") is None
    # The old disk may also be the first to fill an emptied Redis.
    Disk(tmp_path / "c").put_record(record())
    at_redis.flushall()
    async with gateway(tmp_path / "c", redis_server) as stale:
        assert stale.serves("zh") == content(1).digest
        async with gateway(tmp_path / "a", redis_server) as one:
            assert one.serves("zh") is None
            await becomes(lambda: stale.serves("zh") is None)


async def test_changes_made_apart_are_all_kept(tmp_path: Path, redis_server: RedisServer) -> None:
    async with gateway(tmp_path / "a", redis_server) as one:
        await one.add("zh", 1)
        async with gateway(tmp_path / "b", redis_server):
            pass
    async with gateway(tmp_path / "a", None) as one:
        await one.add("zh", 2)
    async with gateway(tmp_path / "b", None) as other:
        await other.add("zh", 3)
    async with (
        gateway(tmp_path / "a", redis_server) as one,
        gateway(tmp_path / "b", redis_server) as other,
    ):
        await becomes(lambda: one.serves("zh") == other.serves("zh") == content(3).digest)
        for where in (one, other):
            kept = where.registry.snapshot.record("zh").versions
            assert [v.digest for v in kept] == [content(n).digest for n in (1, 2, 3)]
            assert all([await where.holds(number) for number in (1, 2, 3)])


async def test_concurrent_changes_by_two_gateways_lose_none(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        gateway(tmp_path / "a", redis_server) as one,
        gateway(tmp_path / "b", redis_server) as other,
    ):
        await asyncio.gather(
            *((one if number % 2 else other).add("zh", number) for number in range(12))
        )
        digests = {content(number).digest for number in range(12)}
        for where in (one, other):
            await becomes(
                lambda where=where: (
                    digests  # type: ignore[misc]
                    == {v.digest for v in where.registry.snapshot.record("zh").versions}
                )
            )
        assert one.serves("zh") == other.serves("zh")


async def test_an_unreadable_record_comes_back_from_redis(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with gateway(tmp_path, redis_server) as one:
        await one.add("zh", 1)
    (tmp_path / "names" / "zh.json").write_bytes(b"junk")
    async with gateway(tmp_path, redis_server) as again:
        assert again.serves("zh") == content(1).digest
    assert not Disk(tmp_path).has_bad_records()


async def test_an_unreadable_record_in_redis_is_left_alone_and_served_from_disk(
    tmp_path: Path,
    redis_server: RedisServer,
    at_redis: redis.Redis,
    tier: RedisTier,
) -> None:
    async with gateway(tmp_path, redis_server) as one:
        await one.add("zh", 1)
        at_redis.hset("lora:names", "zh", b"junk")
        at_redis.hincrby("lora:names", "@revision", 1)
        await becomes(lambda: one.store.stats.refused_values == 1)
        assert at_redis.hget("lora:names", "zh") == b"junk"
        assert one.serves("zh") == content(1).digest
