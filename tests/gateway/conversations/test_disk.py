"""The disk copy of conversations: versions, tenants, expiry, size limits, processes, damage."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.conversations.disk import FILE, ConversationDisk
from gateway.conversations.record import DELETED, MAX_MEMBERS, OVERHEAD_BYTES, Record
from gateway.conversations.store import Conversations
from gateway.errors import (
    ConversationsOff,
    ConversationsUnavailable,
    ConversationTooLarge,
    UnsupportedParameter,
)

_BYTES = 1024 * 1024
_TTL_S = 1000


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def _store(folder: Path, clock: Clock, ttl_s: int = _TTL_S) -> Conversations:
    return Conversations(folder, ttl_s=ttl_s, tenant_bytes=_BYTES, clock=clock)


def _disk(folder: Path, clock: Clock) -> ConversationDisk:
    return ConversationDisk(
        folder, ttl_ms=_TTL_S * 1000, tenant_bytes=_BYTES, renew_ms=100_000, clock=clock
    )


async def test_the_highest_version_stays_and_what_is_deleted_does_not_return(
    tmp_path: Path, clock: Clock
) -> None:
    async with _store(tmp_path, clock) as store:
        await store.put("a", [Record("resp_1", b"queued", 1)])
        await store.put("a", [Record("resp_1", b"done", 2)])
        await store.put("a", [Record("resp_1", b"late", 1)])
        await store.put("a", [Record("resp_1", b"second", 2)])
        assert await store.get("a", ["resp_1", "resp_2"]) == [Record("resp_1", b"done", 2), None]

        await store.delete("a", ["resp_1"])
        await store.put("a", [Record("resp_1", b"late", 2**62)])
        assert await store.get("a", ["resp_1"]) == [None]
    async with _store(tmp_path, clock) as store:  # the deletion is on disk
        assert await store.get("a", ["resp_1"]) == [None]


async def test_tenants_are_apart(tmp_path: Path, clock: Clock) -> None:
    async with _store(tmp_path, clock) as store:
        await store.put("a", [Record("conv_1", b"a's"), Record("m", b"a's", 0, "conv_1", 1)])
        await store.put("b", [Record("conv_1", b"b's", 9)])
        assert await store.get("", ["conv_1", "m"]) == [None, None]
        assert await store.get("b", ["conv_1", "m"]) == [Record("conv_1", b"b's", 9), None]
        assert await store.members("b", "conv_1") == []
        await store.delete("b", ["conv_1", "m"])
        assert [each and each.data for each in await store.get("a", ["conv_1", "m"])] == [
            b"a's",
            b"a's",
        ]


async def test_members_come_by_order(tmp_path: Path, clock: Clock) -> None:
    async with _store(tmp_path, clock) as store:
        orders = [1_800_000_000_000_000_000 + n for n in range(30)]
        items = [Record(f"msg_{n}", b"x", 0, "conv_1", order) for n, order in enumerate(orders)]
        await store.put("", [Record("conv_1", b"head"), *random.sample(items, len(items))])
        assert await store.members("", "conv_1") == items
        assert await store.members("", "conv_1", after=orders[9], limit=10) == items[10:20]
        await store.delete("", ["msg_3"])
        assert await store.members("", "conv_1", limit=5) == items[:3] + items[4:6]


async def test_what_is_used_lives_on_as_a_whole(tmp_path: Path, clock: Clock) -> None:
    async with _store(tmp_path, clock) as store:
        await store.put("", [Record("conv_1", b"head"), Record("item", b"x", 0, "conv_1", 1)])
        await store.put("", [Record("resp_1", b"unused")])
        for _ in range(3):
            clock.now += 0.6 * _TTL_S
            # reads only the head, which renews its item too
            assert (await store.get("", ["conv_1"]))[0] is not None
        assert len(await store.members("", "conv_1")) == 1
        assert await store.get("", ["resp_1"]) == [None]
        clock.now += _TTL_S
        assert await store.get("", ["conv_1"]) == [None]
        with pytest.raises(ConversationsUnavailable):  # raises instead of returning no items
            await store.members("", "conv_1")


def test_what_was_written_since_is_brought_again_whatever_it_replaced(
    tmp_path: Path, clock: Clock
) -> None:
    disk = _disk(tmp_path, clock)
    disk.put("t", [Record("a", b"x"), Record("b", b"x")], 7)
    after = disk.last_key()
    disk.put("t", [Record("b", b"", DELETED)], 7)
    disk.mark_unshared(after)
    assert [kept.record.id for kept in disk.list_unshared(7, None, 9, 9)] == ["b"]
    disk.close()


def test_who_is_told_of_a_deletion_again_changes_nothing(tmp_path: Path, clock: Clock) -> None:
    disk = _disk(tmp_path, clock)
    disk.put("t", [Record("a", b"x")])
    disk.forget("t", "a", 7)
    [before] = disk.get("t", ["a"])
    clock.now += _TTL_S / 2
    disk.forget("t", "a", 7)
    assert disk.get("t", ["a"]) == [before]
    disk.close()


def test_what_is_known_is_put_again_without_writing_until_it_is_renewed(
    tmp_path: Path, clock: Clock
) -> None:
    """A record that is put again, as after each read, is not written before its renewal is due."""
    disk = _disk(tmp_path, clock)
    record = Record("a", b"x", 1)
    disk.put("t", [record])
    began = clock.now
    log = tmp_path / f"{FILE}-wal"
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    # takes the write lock, which a put without changes does not need
    other.execute("BEGIN IMMEDIATE")
    size = log.stat().st_size
    for _ in range(100):
        clock.now += 1
        assert disk.put("t", [record]).done
    assert log.stat().st_size == size
    other.execute("ROLLBACK")
    other.close()

    clock.now += 1
    assert disk.put("t", [record]).done  # the renewal is due, so this put writes
    clock.now = began + _TTL_S + 1
    assert [kept.record for kept in disk.get("t", ["a"])] == [record]
    disk.close()


async def test_expired_rows_leave_the_file(tmp_path: Path, clock: Clock) -> None:
    disk = _disk(tmp_path, clock)
    for n in range(600):
        disk.put("a", [Record(f"resp_{n}", bytes(1000))])
    size = (tmp_path / FILE).stat().st_size
    clock.now += _TTL_S
    steps = 1
    while disk.tidy():
        steps += 1
    assert steps >= 600 / 256, "it was one long step"
    assert disk.usage() == (0, 0)
    disk.close()
    assert (tmp_path / FILE).stat().st_size < size / 3


async def test_a_tenant_that_fills_the_disk_loses_its_own_oldest_alone(
    tmp_path: Path, clock: Clock
) -> None:
    async with _store(tmp_path, clock) as store:
        await store.put("other", [Record("resp_o", b"keep")])
        for n in range(50):
            clock.now += 1
            await store.put("hostile", [Record(f"resp_{n}", bytes(100_000))])
        newest = [f"resp_{n}" for n in range(50)]
        found = [n for n, each in enumerate(await store.get("hostile", newest)) if each]
        assert found == list(range(40, 50))
        assert await store.get("other", ["resp_o"]) == [Record("resp_o", b"keep")]
        assert store.stats.evicted == 40


async def test_no_bound_is_passed_by_many_small_ones(tmp_path: Path, clock: Clock) -> None:
    disk = _disk(tmp_path, clock)
    for n in range(_BYTES // OVERHEAD_BYTES // 8):
        disk.put("a", [Record(f"resp_{n}_{m}", b"") for m in range(8)])
    calls, evicted = 0, 0
    done = False
    while not done:
        done, removed = disk.put("a", [Record("large", bytes(_BYTES - 2 * OVERHEAD_BYTES))])
        calls, evicted = calls + 1, evicted + removed
        assert disk.usage()[0] <= _BYTES
        assert removed <= 256
    assert calls > 1
    assert evicted >= _BYTES // OVERHEAD_BYTES - 1
    disk.close()


async def test_a_conversation_is_evicted_whole(tmp_path: Path, clock: Clock) -> None:
    disk = _disk(tmp_path, clock)
    disk.put("", [Record("conv_1", b"head")])
    for n in range(700):
        disk.put("", [Record(f"item_{n}", bytes(700), 0, "conv_1", n)])
    clock.now += 1
    assert disk.put("", [Record("resp_1", bytes(100_000))]).done
    assert disk.put("", [Record("resp_2", bytes(100_000))]) == (True, 256)
    assert disk.get("", ["conv_1"]) == [], "items are missing, and nobody is told"
    disk.close()


async def test_what_is_too_large_is_refused(tmp_path: Path, clock: Clock) -> None:
    async with _store(tmp_path, clock) as store:
        with pytest.raises(ConversationTooLarge):
            await store.put("", [Record("resp_1", bytes(_BYTES))])
        await store.put("", [Record("conv_1", b"head")])
        await store.put("", [Record("a", bytes(_BYTES // 2), 0, "conv_1", 1)])
        with pytest.raises(ConversationTooLarge):
            await store.put("", [Record("b", bytes(_BYTES // 2), 0, "conv_1", 2)])
        items = [Record(f"m{n}", b"x", 0, "conv_2", n) for n in range(MAX_MEMBERS + 1)]
        with pytest.raises(ConversationTooLarge):
            await store.put("", items)
        for wrong in (Record("{}", b"x"), Record("", b"x"), Record("é", b"x")):
            with pytest.raises(ValueError, match="no id"):
                await store.put("", [wrong])
        assert await store.get("", ["' OR 1=1 --", "", "x" * 1000]) == [None] * 3
    disk = _disk(tmp_path, clock)
    with pytest.raises(ConversationTooLarge):
        disk.get("", ["a"], max_bytes=1000)
    disk.close()


async def test_nothing_is_kept_with_a_time_of_zero(tmp_path: Path, clock: Clock) -> None:
    async with _store(tmp_path, clock) as store:
        await store.put("", [Record("resp_1", b"secret")])
    async with _store(tmp_path, clock, ttl_s=0) as store:
        assert not store.enabled
        assert list(tmp_path.iterdir()) == [], "what was kept before is still there"
        with pytest.raises(ConversationsOff) as refused:
            await store.put("", [Record("resp_1", b"secret")])
        assert isinstance(refused.value, UnsupportedParameter)
        assert refused.value.param == "store"
        assert await store.get("", ["resp_1"]) == [None]
        assert await store.members("", "conv_1") == []
        await store.delete("", ["resp_1"])


async def test_others_cannot_read_the_files(tmp_path: Path, clock: Clock) -> None:
    async with _store(tmp_path / "@conversations", clock) as store:
        await store.put("", [Record("resp_1", b"secret")])
        folder = tmp_path / "@conversations"
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
        assert modes == dict.fromkeys([FILE, f"{FILE}-wal", f"{FILE}-shm"], 0o600)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["garbage", "newer"])
async def test_a_file_that_cannot_be_used_is_left_alone_and_the_gateway_lives(
    tmp_path: Path, clock: Clock, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "@conversations"
    folder.mkdir()
    if damage == "garbage":
        (folder / FILE).write_bytes(b"no database" * 1000)
    else:
        with sqlite3.connect(folder / FILE) as made:
            made.execute("PRAGMA user_version = 7")
        made.close()
    before = (folder / FILE).read_bytes()
    async with _store(folder, clock) as store:
        with pytest.raises(ConversationsUnavailable):
            await store.put("", [Record("resp_1", b"x")])
        with pytest.raises(ConversationsUnavailable):
            await store.get("", ["resp_1"])
        assert store.stats.disk_failures == 1
    assert "conversations are not stored" in caplog.text
    if damage == "garbage":
        assert (folder / FILE).read_bytes() == before


async def test_a_disk_that_is_not_there_at_the_start_is_used_once_it_is(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "@conversations"
    folder.write_text("a file")
    async with _store(folder, clock) as store:
        with pytest.raises(ConversationsUnavailable):
            await store.put("", [Record("resp_1", b"x")])
        assert caplog.text.count("conversations are not stored") == 1
        folder.unlink()
        await store.put("", [Record("resp_1", b"x")])
        assert await store.get("", ["resp_1"]) == [Record("resp_1", b"x")]


async def test_a_file_that_is_damaged_meanwhile_is_not_used_any_more(
    tmp_path: Path, clock: Clock
) -> None:
    async with _store(tmp_path, clock) as store:
        for n in range(100):
            await store.put("", [Record(f"resp_{n}", bytes(5000))])
    path = tmp_path / FILE
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    async with _store(tmp_path, clock) as store:
        for _ in range(2):
            with pytest.raises(ConversationsUnavailable):
                await store.get("", ["resp_1"])
        assert store.stats.disk_failures == 1


_PUTS = """
import sys
from pathlib import Path
from gateway.conversations.disk import ConversationDisk
from gateway.conversations.record import Record
disk = ConversationDisk(Path(sys.argv[1]), ttl_ms=10**9, tenant_bytes=2**24, renew_ms=10**8)
print("ready", flush=True)
for n in range(int(sys.argv[3])):
    pair = [Record(f"resp_{sys.argv[2]}_{n}_{half}", b"x" * 3000) for half in "ab"]
    assert disk.put("t", pair).done
    print(n, flush=True)
"""


def _putting(folder: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _PUTS, str(folder), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_two_processes_put_into_one_file(tmp_path: Path) -> None:
    processes = [_putting(tmp_path, name, 200) for name in "pq"]
    for process in processes:
        process.communicate(timeout=120)
        assert process.returncode == 0
    disk = ConversationDisk(tmp_path, ttl_ms=10**9, tenant_bytes=2**24, renew_ms=10**8)
    assert disk.usage() == (800 * (3000 + OVERHEAD_BYTES), 800)
    disk.close()


def test_what_was_put_before_a_kill_is_there_whole(tmp_path: Path) -> None:
    process = _putting(tmp_path, "p", 10**6)
    assert process.stdout is not None
    with process.stdout as told:
        last = next(int(line) for line in told if line == "100\n")
        process.send_signal(signal.SIGKILL)
        for line in told:
            last = int(line) if line.endswith("\n") else last
    process.wait()
    disk = ConversationDisk(tmp_path, ttl_ms=10**9, tenant_bytes=2**24, renew_ms=10**8)
    names = [f"resp_p_{n}_{half}" for n in range(last + 1) for half in "ab"]
    assert {kept.record.id for kept in disk.get("t", names)} == set(names)
    size, records = disk.usage()
    assert records % 2 == 0
    assert size == records * (3000 + OVERHEAD_BYTES)
    disk.close()
