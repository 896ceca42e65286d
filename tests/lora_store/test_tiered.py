"""The whole store: gateways with and without a shared disk, a real Redis that dies and forgets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from adapters.adapter import Converted
from adapters.errors import StoreUnavailable, UnknownAdapter, VersionUnavailable
from adapters.record import Record
from lora_store import versions
from lora_store.disk import Disk
from lora_store.memory import Memory
from lora_store.redis import RedisTier
from lora_store.redis_values import dump
from tests.support.adapter_store import (
    NEVER_S,
    StoreGateway,
    becomes,
    copies,
    record,
    store_gateway,
    version_file,
)
from tests.support.full_disk import full_disk
from tests.support.lora_files import content
from tests.support.redis_server import RedisServer, running_redis


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def redis_client(server: RedisServer) -> Iterator[redis.Redis]:
    """To look, to damage, to empty."""
    with server.client() as client:
        yield client


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RedisTier]:
    tier = RedisTier(server.settings())
    yield tier
    tier.close()


def gateway(
    root: Path, server: RedisServer | None, **options: Any
) -> contextlib.AbstractAsyncContextManager[StoreGateway]:
    return store_gateway(root, None if server is None else server.settings(), **options)


async def listening(server: RedisServer, count: int) -> None:
    """Until so many gateways hear what is published."""
    with server.client() as client:
        await becomes(lambda: client.pubsub_numsub("lora:changes") == [(b"lora:changes", count)])


async def test_without_redis_all_is_on_disk(tmp_path: Path) -> None:
    async with gateway(tmp_path, None) as one:
        await one.add("zh", 1)
        assert one.store.stats.unsent == 0
    async with gateway(tmp_path, None) as again:
        assert again.serves("zh") == content(1).digest
        assert await again.holds(1)
        with pytest.raises(VersionUnavailable, match=content(2).digest[:12]):
            await again.store.get(content(2).digest)


async def test_a_hundred_who_ask_at_once_cause_one_read(
    tmp_path: Path, server: RedisServer
) -> None:
    async with gateway(tmp_path / "a", server) as one:
        await one.add("zh", 1)
    async with gateway(tmp_path / "b", server, poll_s=60) as other:
        await asyncio.gather(*(other.holds(1) for _ in range(100)))
        stats = other.store.stats
        assert (stats.disk_misses, stats.redis_hits, stats.disk_hits) == (1, 1, 0)
    async with gateway(tmp_path / "b", server) as again:
        gets = [asyncio.create_task(again.holds(1)) for _ in range(100)]
        await asyncio.sleep(0)
        for task in gets[:50]:
            task.cancel()
        assert all(await asyncio.gather(*gets[50:]))
        assert again.store.stats.disk_hits == 1
        assert await again.holds(1)
        assert again.store.stats.memory_hits == 1


async def test_memory_keeps_what_was_used_last_within_its_bytes(tmp_path: Path) -> None:
    size = content(1).nbytes
    async with gateway(tmp_path, None, memory_bytes=2 * size) as one:
        for number in (1, 2, 3):
            await one.add(f"a{number}", number)
        stats = one.store.stats
        assert stats.memory_bytes == 2 * size
        before = stats.disk_hits
        await one.holds(3)
        await one.holds(2)
        assert stats.disk_hits == before
        await one.holds(1)
        assert stats.disk_hits == before + 1
        await one.holds(2)
        assert stats.disk_hits == before + 1


def test_memory_does_not_keep_what_is_larger_than_itself() -> None:
    memory = Memory(content(1).nbytes - 1)
    memory.put(content(1))
    assert memory.get(content(1).digest) is None
    assert memory.nbytes == 0


async def test_another_gateway_is_told_of_each_change(tmp_path: Path, server: RedisServer) -> None:
    async with (
        gateway(tmp_path / "a", server, poll_s=NEVER_S) as one,
        gateway(tmp_path / "b", server, poll_s=NEVER_S) as other,
    ):
        await listening(server, 2)
        await one.add("zh", 1)
        await becomes(lambda: other.serves("zh") == content(1).digest)
        await one.add("zh", 2)
        await becomes(lambda: other.serves("zh") == content(2).digest)
        await other.registry.rollback("zh")
        await becomes(lambda: one.serves("zh") == content(1).digest)
        await one.registry.remove("zh")
        await becomes(lambda: other.serves("zh") is None)
        await becomes(lambda: other.store.stats.notices == 4)


async def test_a_lost_notice_is_made_up_for(
    tmp_path: Path, server: RedisServer, redis_client: redis.Redis
) -> None:
    async with gateway(tmp_path, server, poll_s=0.05) as one:
        fields = {"zh": dump(record()), "@epoch": b"e", "@revision": 1}
        redis_client.hset("lora:names", mapping=fields)
        await becomes(lambda: one.serves("zh") == content(1).digest)
        assert one.store.stats.notices == 0


async def test_nothing_is_read_while_nothing_changes(
    tmp_path: Path, server: RedisServer, redis_client: redis.Redis
) -> None:
    async with gateway(tmp_path, server, poll_s=0.01) as one:
        await one.add("zh", 1)
        # A folder that changed within the last second is read again, as its clock is coarse.
        os.utime(tmp_path / "names", (1, 1))

        def looks() -> int:
            return int(redis_client.info("commandstats")["cmdstat_hmget"]["calls"])

        before = -1
        while one.store.stats.syncs != before:  # what follows the change comes to its end
            before, looked = one.store.stats.syncs, looks()
            await becomes(lambda looked=looked: looks() >= looked + 20)  # type: ignore[misc]


async def test_workers_on_one_folder_see_changes_without_redis(tmp_path: Path) -> None:
    async with (
        gateway(tmp_path, None, poll_s=0.02) as one,
        gateway(tmp_path, None, poll_s=0.02) as other,
    ):
        for number in (1, 2):
            await one.add("zh", number)
            await becomes(lambda number=number: other.serves("zh") == content(number).digest)  # type: ignore[misc]
        assert await other.holds(2)
        await other.registry.remove("zh")
        await becomes(lambda: one.serves("zh") is None)


async def test_redis_is_enough_for_a_gateway_with_its_own_disk(
    tmp_path: Path, server: RedisServer
) -> None:
    async with gateway(tmp_path / "a", server) as one:
        await one.add("zh", 1)
    async with gateway(tmp_path / "b", server) as other:
        assert other.serves("zh") == content(1).digest
        assert await other.holds(1)
        assert copies(tmp_path / "b") == {content(1).digest}


async def test_every_version_in_use_comes_to_every_disk_unasked(
    tmp_path: Path, server: RedisServer
) -> None:
    async with (
        gateway(tmp_path / "a", server) as one,
        gateway(tmp_path / "b", server),
    ):
        await one.add("zh", 1)
        await one.add("zh", 2)
        both = {content(1).digest, content(2).digest}
        await becomes(lambda: copies(tmp_path / "b") == both)


async def test_redis_killed_known_adapters_go_on_and_changes_arrive_later(
    tmp_path: Path, server: RedisServer
) -> None:
    async with (
        gateway(tmp_path / "a", server) as one,
        gateway(tmp_path / "b", server) as other,
    ):
        await one.add("zh", 1)
        await becomes(lambda: copies(tmp_path / "b") == {content(1).digest})
        server.kill()
        await becomes(lambda: not one.store.stats.redis_up and not other.store.stats.redis_up)
        assert await other.holds(1)
        await one.add("ja", 2)
        assert one.serves("ja") == content(2).digest
        assert one.store.stats.unsent == 1
        with pytest.raises(StoreUnavailable, match=content(3).digest[:12]):
            await other.store.get(content(3).digest)
        server.start()
        await becomes(lambda: other.serves("ja") == content(2).digest)
        assert other.serves("zh") == content(1).digest
        assert await other.holds(2)
        await becomes(lambda: one.store.stats.unsent == 0)


async def test_nobody_waits_for_a_redis_that_is_known_to_be_away(
    tmp_path: Path, server: RedisServer
) -> None:
    async with gateway(tmp_path, server) as one:
        await listening(server, 1)
        server.kill()
        await becomes(lambda: not one.store.stats.redis_up)
        with server.silent() as silent:
            # The store asks whether Redis is back, and listens. Nobody answers.
            asking = [await asyncio.to_thread(silent.accept) for _ in range(2)]
            await one.add("zh", 1)
            assert one.store.stats.unsent == 1
            silent.setblocking(False)
            with pytest.raises(BlockingIOError):
                silent.accept()
            for connection, _ in asking:
                connection.close()
        server.start()
        await becomes(lambda: one.store.stats.unsent == 0)


@pytest.mark.parametrize("how", ["flushall", "kill"])
async def test_an_emptied_redis_is_refilled_and_nothing_is_lost(
    tmp_path: Path,
    server: RedisServer,
    how: str,
    redis_client: redis.Redis,
    tier: RedisTier,
) -> None:
    async with gateway(tmp_path / "a", server) as one:
        for number in range(5):
            await one.add(f"a{number}", number)
        await one.registry.remove("a0")
        if how == "flushall":
            redis_client.flushall()
        else:
            server.kill()
            server.start()
        live = [content(number).digest for number in range(1, 5)]
        await becomes(lambda: tier.has(live) == set(live))
        async with gateway(tmp_path / "b", server) as other:
            assert [other.serves(f"a{n}") for n in range(5)] == [None, *live]
            assert all([await other.holds(number) for number in range(1, 5)])


async def test_a_version_that_redis_dropped_is_asked_for(
    tmp_path: Path,
    server: RedisServer,
    redis_client: redis.Redis,
) -> None:
    """As with a time to live that has run out, or a chunk that the memory policy took."""
    async with gateway(tmp_path / "a", server) as one:
        await one.add("zh", 1)
        await listening(server, 1)
        redis_client.delete(f"lora:version:{content(1).digest}:0")
        async with gateway(tmp_path / "b", server) as other:
            assert await other.holds(1)
            assert other.store.stats.redis_misses == 1
            await becomes(lambda: one.store.stats.refilled == 1)


async def test_a_damaged_disk_copy_is_replaced_from_redis(
    tmp_path: Path, server: RedisServer
) -> None:
    async with gateway(tmp_path, server) as one:
        await one.add("zh", 1)
    path = version_file(tmp_path, content(1).digest)
    path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    async with gateway(tmp_path, server) as again:
        assert await again.holds(1)
        assert again.store.stats.corrupt_copies == 1
    assert Disk(tmp_path).get(content(1).digest)
    assert (tmp_path / "quarantine" / path.name).exists()


async def test_verify_reads_again_what_was_verified_before(
    tmp_path: Path, server: RedisServer
) -> None:
    async with gateway(tmp_path, server) as one:
        await one.add("zh", 1)
        await one.store.verify(content(1).digest)
        path = version_file(tmp_path, content(1).digest)
        before = path.stat()
        with path.open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\x55\xaa")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        await one.store.get(content(1).digest)
        assert one.store.stats.corrupt_copies == 0
        await one.store.verify(content(1).digest)
        assert one.store.stats.corrupt_copies == 1
        assert await one.holds(1)


async def test_a_damaged_copy_in_redis_is_replaced_from_a_disk(
    tmp_path: Path,
    server: RedisServer,
    redis_client: redis.Redis,
) -> None:
    async with gateway(tmp_path / "a", server) as one:
        await one.add("zh", 1)
        await listening(server, 1)
        redis_client.setrange(f"lora:version:{content(1).digest}:0", 5000, b"\x00\x01\x02")
        async with gateway(tmp_path / "b", server) as other:
            assert await other.holds(1)
            assert other.store.stats.corrupt_copies == 1


async def test_no_intact_copy_anywhere_is_a_clear_error(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    server: RedisServer,
    redis_client: redis.Redis,
) -> None:
    async with gateway(tmp_path, server) as one:
        await one.add("zh", 1)
    version_file(tmp_path, content(1).digest).write_bytes(b"junk")
    redis_client.delete(f"lora:version:{content(1).digest}")
    async with gateway(tmp_path, server) as again:
        monkeypatch.setattr(versions, "_WANTED_S", 0.1)
        with pytest.raises(VersionUnavailable, match=content(1).digest[:12]) as caught:
            await again.store.get(content(1).digest)
        assert caught.value.digest == content(1).digest
        await again.add("zh", 1)
        assert await again.holds(1)


async def test_an_old_disk_does_not_bring_a_removed_adapter_back(
    tmp_path: Path,
    server: RedisServer,
    redis_client: redis.Redis,
) -> None:
    async with gateway(tmp_path / "a", server) as one:
        await one.add("zh", 1)
        async with gateway(tmp_path / "b", server) as other:
            assert other.serves("zh")
        await one.registry.remove("zh")
        redis_client.flushall()
        async with gateway(tmp_path / "b", server) as other:
            await becomes(lambda: other.serves("zh") is None)
        assert one.serves("zh") is None
    # The old disk may also be first to fill an empty Redis.
    Disk(tmp_path / "c").put_record(record())
    redis_client.flushall()
    async with gateway(tmp_path / "c", server) as stale:
        assert stale.serves("zh") == content(1).digest
        async with gateway(tmp_path / "a", server) as one:
            assert one.serves("zh") is None
            await becomes(lambda: stale.serves("zh") is None)


async def test_changes_made_apart_are_all_kept(tmp_path: Path, server: RedisServer) -> None:
    async with gateway(tmp_path / "a", server) as one:
        await one.add("zh", 1)
        async with gateway(tmp_path / "b", server):
            pass
    async with gateway(tmp_path / "a", None) as one:
        await one.add("zh", 2)
    async with gateway(tmp_path / "b", None) as other:
        await other.add("zh", 3)
    async with gateway(tmp_path / "a", server) as one, gateway(tmp_path / "b", server) as other:
        await becomes(lambda: one.serves("zh") == other.serves("zh") == content(3).digest)
        for where in (one, other):
            kept = where.registry.snapshot.record("zh").versions
            assert [v.digest for v in kept] == [content(n).digest for n in (1, 2, 3)]
            assert all([await where.holds(number) for number in (1, 2, 3)])


async def test_concurrent_changes_by_two_gateways_lose_none(
    tmp_path: Path, server: RedisServer
) -> None:
    async with gateway(tmp_path / "a", server) as one, gateway(tmp_path / "b", server) as other:
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
    tmp_path: Path, server: RedisServer
) -> None:
    async with gateway(tmp_path, server) as one:
        await one.add("zh", 1)
    (tmp_path / "names" / "zh.json").write_bytes(b"junk")
    async with gateway(tmp_path, server) as again:
        assert again.serves("zh") == content(1).digest
    assert not Disk(tmp_path).has_bad_records()


async def test_an_unreadable_record_in_redis_is_left_alone_and_served_from_disk(
    tmp_path: Path,
    server: RedisServer,
    redis_client: redis.Redis,
    tier: RedisTier,
) -> None:
    async with gateway(tmp_path, server) as one:
        await one.add("zh", 1)
        redis_client.hset("lora:names", "zh", b"junk")
        redis_client.hincrby("lora:names", "@revision", 1)
        await becomes(lambda: one.store.stats.refused_values == 1)
        assert redis_client.hget("lora:names", "zh") == b"junk"
        assert one.serves("zh") == content(1).digest


async def test_a_full_disk_does_not_stop_serving(tmp_path: Path, server: RedisServer) -> None:
    async with gateway(tmp_path / "a", server) as one:
        await one.add("zh", 1)
    async with gateway(tmp_path / "b", None):
        pass  # which makes its folders
    with full_disk(2048):
        async with gateway(tmp_path / "b", server, poll_s=NEVER_S) as other:
            assert await other.holds(1)
            assert await other.holds(1)
            assert other.store.stats.memory_hits == 1
    assert copies(tmp_path / "b") == set()


async def test_collect_deletes_only_what_no_record_names(
    tmp_path: Path,
    server: RedisServer,
    tier: RedisTier,
) -> None:
    async with gateway(tmp_path, server) as one:
        for number in (1, 2, 3):
            await one.add(f"a{number}", number)
        await one.registry.remove("a1")
        tiers = one.store._versions
        in_use = {content(2).digest, content(3).digest}
        await tiers.collect(in_use, 60.0)
        assert len(copies(tmp_path)) == 3
        (tmp_path / "quarantine" / "zh.json").write_text("junk")
        await tiers.collect(in_use, -1.0)
        assert len(copies(tmp_path)) == 3
        (tmp_path / "quarantine" / "zh.json").unlink()
        await tiers.collect(in_use, -1.0)
        assert copies(tmp_path) == in_use
        assert tier.digests(-1.0) == in_use
        assert await one.holds(2)


async def test_a_change_that_raises_writes_nothing(
    tmp_path: Path, server: RedisServer, redis_client: redis.Redis, tier: RedisTier
) -> None:
    def refuse(known: Record | None) -> Record:
        raise UnknownAdapter("adapter", "name", "zh", "another")

    async with gateway(tmp_path, server) as one:
        with pytest.raises(UnknownAdapter):
            await one.store.change("zh", refuse)
        assert await one.store.records() == {}
        assert redis_client.dbsize() == 0
        await one.add("zh", 1)
        revision = tier.position()
        await one.add("zh", 1)
        assert tier.position() == revision


async def test_starting_and_going_on_while_redis_is_away(
    tmp_path: Path,
    server: RedisServer,
    tier: RedisTier,
) -> None:
    server.kill()
    async with gateway(tmp_path, server) as one:
        assert not one.store.stats.redis_up
        await one.add("zh", 1)
        server.start()
        await becomes(lambda: one.store.stats.redis_up)
        await becomes(lambda: tier.record("zh") is not None)


async def test_the_view_never_goes_back(tmp_path: Path) -> None:
    """A record that is older than the one known does not replace it."""
    async with gateway(tmp_path, None) as one:
        await one.add("zh", 1)
        await one.add("zh", 2)
        current = one.registry.snapshot.record("zh")
        one.store._take({"zh": replace(current, revision=1, served=content(1).digest)})
        assert one.serves("zh") == content(2).digest


def test_what_is_sent_is_what_lies_on_disk(tmp_path: Path) -> None:
    """The weights of a stored adapter are the mapped file itself, page-aligned."""
    Disk(tmp_path).put(content(1, 10_000))
    found: Converted | None = Disk(tmp_path).get(content(1, 10_000).digest)
    assert found is not None
    assert isinstance(found.weights, memoryview)
    assert found.weights.nbytes == found.nbytes
    assert type(found.weights.obj).__name__ == "mmap"


def test_serving_what_is_converted_needs_no_numpy() -> None:
    modules = "adapters.registry, adapters.peft, adapters.sizes, lora_store.tiered"
    check = f"import sys, {modules}; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
