"""The tiered adapter store, with shared and separate disks and a Redis that dies or loses data."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from adapters.errors import StoreUnavailable, UnknownAdapter, VersionUnavailable
from adapters.record import Record
from lora_store.disk import Disk
from lora_store.memory import MemoryTier
from lora_store.redis import RedisTier
from lora_store.redis_values import dump
from lora_store.refusals import RefusedValues
from tests.support.adapter_store import (
    NEVER_S,
    becomes,
    copies,
    gateway,
    listening,
    record,
    version_file,
)
from tests.support.full_disk import full_disk
from tests.support.lora_files import content
from tests.support.redis_server import RedisServer


def _is_waited_for(lock: Path) -> bool:
    waiting = (line for line in Path("/proc/locks").read_text().splitlines() if "->" in line)
    return any(f":{lock.stat().st_ino} " in line for line in waiting)


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
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with gateway(tmp_path / "a", redis_server) as one:
        await one.add("zh", 1)
    async with gateway(tmp_path / "b", redis_server, poll_s=60) as other:
        await asyncio.gather(*(other.holds(1) for _ in range(100)))
        stats = other.store.stats
        assert (stats.disk_misses, stats.redis_hits, stats.disk_hits) == (1, 1, 0)
    async with gateway(tmp_path / "b", redis_server) as again:
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
    memory = MemoryTier(content(1).nbytes - 1)
    memory.put(content(1))
    assert memory.get(content(1).digest) is None
    assert memory.nbytes == 0


async def test_another_gateway_is_told_of_each_change(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        gateway(tmp_path / "a", redis_server, poll_s=NEVER_S) as one,
        gateway(tmp_path / "b", redis_server, poll_s=NEVER_S) as other,
    ):
        await listening(redis_server, 2)
        await one.add("zh", 1)
        await becomes(lambda: other.serves("zh") == content(1).digest)
        await one.add("zh", 2)
        await becomes(lambda: other.serves("zh") == content(2).digest)
        await other.registry.rollback("zh")
        await becomes(lambda: one.serves("zh") == content(1).digest)
        await one.registry.remove("zh")
        await becomes(lambda: other.serves("zh") is None)
        await becomes(lambda: other.store.stats.notices == 4)


async def test_a_version_is_asked_for_again_when_nobody_heard_the_first_time(
    tmp_path: Path,
    redis_server: RedisServer,
    at_redis: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway asks again for a version if the owner missed the first request.

    After an outage of Redis the owner may be the last gateway to subscribe again.
    """
    wants: list[str] = []
    async with (
        gateway(tmp_path / "a", redis_server) as one,
        gateway(tmp_path / "b", redis_server) as other,
    ):
        await listening(redis_server, 2)
        await one.store.put(content(1))
        handle = one.store._handle_message

        def lose_first(message: str, refusals: RefusedValues) -> None:
            wants.append(message)
            if len(wants) > 1:
                handle(message, refusals)

        monkeypatch.setattr(one.store, "_handle_message", lose_first)
        at_redis.delete(*at_redis.scan_iter("lora:version*"))
        assert await other.holds(1)
    assert len(wants) >= 2
    assert len({*wants}) == 1


async def test_a_gateway_without_a_version_keeps_nobody_from_putting_it(
    tmp_path: Path, redis_server: RedisServer, at_redis: redis.Redis
) -> None:
    digest = content(1).digest
    async with (
        gateway(tmp_path / "a", redis_server) as one,
        gateway(tmp_path / "b", redis_server) as other,
    ):
        await one.store.put(content(1))
        at_redis.delete(*at_redis.scan_iter("lora:version*"))
        await other.store._versions.send_missing([digest])
        assert not at_redis.exists(f"lora:version:{digest}")
        await one.store._versions.send_missing([digest])
        assert at_redis.exists(f"lora:version:{digest}")


async def test_a_lost_notice_is_made_up_for(
    tmp_path: Path, redis_server: RedisServer, at_redis: redis.Redis
) -> None:
    async with gateway(tmp_path, redis_server, poll_s=0.05) as one:
        fields = {"zh": dump(record()), "@epoch": b"e", "@revision": 1}
        at_redis.hset("lora:names", mapping=fields)
        await becomes(lambda: one.serves("zh") == content(1).digest)
        assert one.store.stats.notices == 0


async def test_nothing_is_read_while_nothing_changes(
    tmp_path: Path, redis_server: RedisServer, at_redis: redis.Redis
) -> None:
    async with gateway(tmp_path, redis_server, poll_s=0.01) as one:
        await one.add("zh", 1)
        # The store reads a folder that changed within the last second again, as file times are
        # coarse. Make the folder look old.
        os.utime(tmp_path / "names", (1, 1))

        def looks() -> int:
            return int(at_redis.info("commandstats")["cmdstat_hmget"]["calls"])

        before = -1
        while one.store.stats.syncs != before:  # syncs that the change itself caused may still run
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
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with gateway(tmp_path / "a", redis_server) as one:
        await one.add("zh", 1)
    async with gateway(tmp_path / "b", redis_server) as other:
        assert other.serves("zh") == content(1).digest
        assert await other.holds(1)
        assert copies(tmp_path / "b") == {content(1).digest}


async def test_every_version_in_use_comes_to_every_disk_unasked(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        gateway(tmp_path / "a", redis_server) as one,
        gateway(tmp_path / "b", redis_server),
    ):
        await one.add("zh", 1)
        await one.add("zh", 2)
        both = {content(1).digest, content(2).digest}
        await becomes(lambda: copies(tmp_path / "b") == both)


async def test_redis_killed_known_adapters_go_on_and_changes_arrive_later(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        gateway(tmp_path / "a", redis_server) as one,
        gateway(tmp_path / "b", redis_server) as other,
    ):
        await one.add("zh", 1)
        await becomes(lambda: copies(tmp_path / "b") == {content(1).digest})
        redis_server.kill()
        await becomes(lambda: not one.store.stats.redis_up and not other.store.stats.redis_up)
        assert await other.holds(1)
        await one.add("ja", 2)
        assert one.serves("ja") == content(2).digest
        assert one.store.stats.unsent == 1
        with pytest.raises(StoreUnavailable, match=content(3).digest[:12]):
            await other.store.get(content(3).digest)
        redis_server.start()
        await becomes(lambda: other.serves("ja") == content(2).digest)
        assert other.serves("zh") == content(1).digest
        assert await other.holds(2)
        await becomes(lambda: one.store.stats.unsent == 0)


async def test_nobody_waits_for_a_redis_that_is_known_to_be_away(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with gateway(tmp_path, redis_server) as one:
        await listening(redis_server, 1)
        redis_server.kill()
        await becomes(lambda: not one.store.stats.redis_up)
        with redis_server.silent() as silent:
            # The store opens two connections: a probe and the subscription. Neither gets an answer.
            asking = [await asyncio.to_thread(silent.accept) for _ in range(2)]
            await one.add("zh", 1)
            assert one.store.stats.unsent == 1
            silent.setblocking(False)
            with pytest.raises(BlockingIOError):
                silent.accept()
            for connection, _ in asking:
                connection.close()
        redis_server.start()
        await becomes(lambda: one.store.stats.unsent == 0)


async def test_many_slow_reads_hold_up_no_change(tmp_path: Path) -> None:
    """Changes do not queue behind many slow reads, for example after an engine's restart.

    Each version file is a FIFO here, so a read blocks until the test opens the FIFO for writing.
    """
    numbers = range(8)
    paths = [version_file(tmp_path, content(number).digest) for number in numbers]
    async with gateway(tmp_path, None, memory_bytes=0, poll_s=NEVER_S) as one:
        for number, path in zip(numbers, paths, strict=True):
            await one.add(f"a{number}", number)
            path.unlink()
            os.mkfifo(path)
        reads = [asyncio.create_task(one.holds(number)) for number in numbers]
        await becomes(lambda: one.store.stats.memory_misses == len(reads))
        try:
            async with asyncio.timeout(300):
                await one.registry.remove("a0")
            assert not any(read.done() for read in reads)
        finally:
            await becomes(
                lambda: [_let_go(path) for path in paths] and all(r.done() for r in reads)
            )
        for read in reads:
            with pytest.raises(VersionUnavailable):
                await read


async def test_what_was_read_for_somebody_who_has_gone_is_not_read_again(tmp_path: Path) -> None:
    async with gateway(tmp_path, None, poll_s=NEVER_S) as one:
        await one.add("zh", 1)
    async with gateway(tmp_path, None, poll_s=NEVER_S) as one:
        stats = one.store.stats
        reading = asyncio.create_task(one.store.get(content(1).digest))
        await asyncio.sleep(0)
        reading.cancel()
        await becomes(lambda: stats.disk_hits == 1)
        assert reading.cancelled()
        assert await one.holds(1)
        assert (stats.disk_hits, stats.memory_hits) == (1, 1)


async def test_what_is_in_memory_waits_for_no_silent_redis(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    missing = [content(number).digest for number in range(2, 10)]  # more than the store has threads
    async with gateway(tmp_path, redis_server, poll_s=NEVER_S) as one:
        await one.add("zh", 1)
        before = one.store.stats.disk_misses
        redis_server.signal(signal.SIGSTOP)
        try:
            reads = [asyncio.create_task(one.store.get(digest)) for digest in missing]
            await becomes(lambda: one.store.stats.disk_misses == before + len(reads))
            assert await one.holds(1)
            assert not any(read.done() for read in reads)
        finally:
            redis_server.signal(signal.SIGCONT)
            for read in reads:
                read.cancel()
        assert one.store.stats.memory_hits == 1


def _let_go(pipe: Path) -> None:
    """Open the FIFO for writing and close it, if a reader is blocked on it."""
    with contextlib.suppress(OSError):
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


async def test_a_full_disk_does_not_stop_serving(tmp_path: Path, redis_server: RedisServer) -> None:
    async with gateway(tmp_path / "a", redis_server) as one:
        await one.add("zh", 1)
    async with gateway(tmp_path / "b", None):
        pass  # only creates the folders, while the disk is not yet full
    with full_disk(2048):
        async with gateway(tmp_path / "b", redis_server, poll_s=NEVER_S) as other:
            assert await other.holds(1)
            assert await other.holds(1)
            assert other.store.stats.memory_hits == 1
    assert copies(tmp_path / "b") == set()


async def test_collect_deletes_only_what_no_record_names(
    tmp_path: Path,
    redis_server: RedisServer,
    tier: RedisTier,
) -> None:
    async with gateway(tmp_path, redis_server) as one:
        for number in (1, 2, 3):
            await one.add(f"a{number}", number)
        await one.registry.remove("a1")
        collect = one.store._collector.collect
        in_use = {content(2).digest, content(3).digest}
        await collect(lambda: in_use, 60.0)
        assert len(copies(tmp_path)) == 3
        (tmp_path / "quarantine" / "zh.json").write_text("junk")
        await collect(lambda: in_use, -1.0)
        assert len(copies(tmp_path)) == 3
        (tmp_path / "quarantine" / "zh.json").unlink()
        await collect(lambda: in_use, -1.0)
        assert copies(tmp_path) == in_use
        assert tier.digests(-1.0) == in_use
        assert await one.holds(2)


async def test_what_has_just_lost_its_name_stays_for_who_waits_for_it(tmp_path: Path) -> None:
    async with gateway(tmp_path, None) as one:
        await one.add("zh", 1)
        os.utime(version_file(tmp_path, content(1).digest), (1, 1))  # old enough to be collected
        await one.registry.remove("zh")
        await one.store._collector.collect(set, 60.0)
        assert await one.holds(1)
        await one.store._collector.collect(set, -1.0)
        assert copies(tmp_path) == set()


async def test_what_is_added_again_while_the_unnamed_go_stays(tmp_path: Path) -> None:
    async with gateway(tmp_path, None) as one:
        numbers = range(1, 41)
        for number in numbers:
            await one.store.put(content(number))
        found = iter([set[str](), *({content(n).digest for n in numbers} for _ in numbers)])
        await one.store._collector.collect(lambda: next(found), -1.0)
        assert len(copies(tmp_path)) == len(numbers)


async def test_a_put_that_meets_the_deletion_keeps_the_version(tmp_path: Path) -> None:
    disk, digest = Disk(tmp_path), content(1).digest
    await asyncio.to_thread(disk.put, content(1))
    os.utime(version_file(tmp_path, digest), (1, 1))
    with disk.lock():  # held as by a collector that is about to delete the file
        put = asyncio.create_task(asyncio.to_thread(disk.put, content(1)))
        await becomes(lambda: put.done() or _is_waited_for(tmp_path / "lock"))
        version_file(tmp_path, digest).unlink()
    await put
    assert copies(tmp_path) == {digest}


async def test_a_change_that_raises_writes_nothing(
    tmp_path: Path, redis_server: RedisServer, at_redis: redis.Redis, tier: RedisTier
) -> None:
    def refuse(known: Record | None) -> Record:
        raise UnknownAdapter("adapter", "name", "zh", "another")

    async with gateway(tmp_path, redis_server) as one:
        with pytest.raises(UnknownAdapter):
            await one.store.change("zh", refuse)
        assert await one.store.records() == {}
        assert at_redis.dbsize() == 0
        await one.add("zh", 1)
        revision = tier.position()
        await one.add("zh", 1)
        assert tier.position() == revision


async def test_starting_and_going_on_while_redis_is_away(
    tmp_path: Path,
    redis_server: RedisServer,
    tier: RedisTier,
) -> None:
    redis_server.kill()
    async with gateway(tmp_path, redis_server) as one:
        assert not one.store.stats.redis_up
        await one.add("zh", 1)
        redis_server.start()
        await becomes(lambda: one.store.stats.redis_up)
        await becomes(lambda: tier.record("zh") is not None)


async def test_the_view_never_goes_back(tmp_path: Path) -> None:
    """A record that is older than the one known does not replace it."""
    async with gateway(tmp_path, None) as one:
        await one.add("zh", 1)
        await one.add("zh", 2)
        current = one.registry.snapshot.record("zh")
        one.store._merge({"zh": replace(current, revision=1, served=content(1).digest)})
        assert one.serves("zh") == content(2).digest


def test_serving_what_is_converted_needs_no_numpy() -> None:
    modules = "adapters.registry, adapters.peft, adapters.sizes, lora_store.tiered"
    check = f"import sys, {modules}; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
