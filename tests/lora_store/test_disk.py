"""The adapter store's disk tier, tested with real files, several processes and killed writers."""

from __future__ import annotations

import errno
import multiprocessing
import os
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from adapters.adapter import Converted
from adapters.record import Record
from lora_store import names
from lora_store.codec import CorruptBlob, encode
from lora_store.disk import Disk
from tests.support.adapter_store import record, version_file
from tests.support.lora_files import content

SPAWN = multiprocessing.get_context("spawn")


def _same(one: Converted | None, other: Converted) -> bool:
    return one is not None and bytes(one.weights) == bytes(other.weights)


def test_put_get_delete(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    assert disk.get(content(1).digest) is None
    disk.put(content(1))
    assert disk.has(content(1).digest)
    assert _same(disk.get(content(1).digest), content(1))
    assert _same(Disk(tmp_path).get(content(1).digest), content(1))
    assert disk.digests() == {content(1).digest}
    assert disk.digests(older_than_s=60) == set()
    assert not disk.delete(content(1).digest, older_than_s=60)
    assert disk.delete(content(1).digest)
    assert disk.get(content(1).digest) is None
    assert not disk.delete(content(1).digest)


def test_a_deleted_version_can_still_be_sent_by_who_holds_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.put(content(1))
    held = disk.get(content(1).digest)
    disk.delete(content(1).digest)
    assert _same(held, content(1))


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "other"])
def test_a_damaged_copy_is_moved_away_and_never_returned(tmp_path: Path, damage: str) -> None:
    disk = Disk(tmp_path)
    disk.put(content(1))
    path = version_file(tmp_path, content(1).digest)
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[-7] ^= 1
    elif damage == "cut":
        raw = raw[:-1]
    elif damage == "empty":
        raw.clear()
    else:
        raw = bytearray(b"".join(encode(content(2))))
    path.write_bytes(raw)
    with pytest.raises(CorruptBlob):
        disk.get(content(1).digest)
    assert not path.exists()
    assert (tmp_path / "quarantine" / path.name).read_bytes() == raw
    assert disk.get(content(1).digest) is None
    disk.put(content(1))
    assert _same(disk.get(content(1).digest), content(1))


def test_putting_over_a_damaged_copy_mends_it(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.put(content(1))
    version_file(tmp_path, content(1).digest).write_bytes(b"junk")
    disk.put(content(1))
    assert _same(Disk(tmp_path).get(content(1).digest), content(1))


def test_what_was_read_stays_whatever_becomes_of_the_file(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.put(content(1))
    held = disk.get(content(1).digest)
    path = version_file(tmp_path, content(1).digest)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(bytes(size - 4096))
    assert _same(held, content(1))
    os.truncate(path, 0)
    assert _same(held, content(1))


def test_every_byte_is_verified_at_every_read(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.put(content(1))
    assert disk.get(content(1).digest)
    path = version_file(tmp_path, content(1).digest)
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(bytes([path.read_bytes()[-1] ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CorruptBlob, match="content"):
        disk.get(content(1).digest)


def test_no_memory_is_taken_for_what_a_file_only_says_that_it_has(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.put(content(1))
    path = version_file(tmp_path, content(1).digest)
    os.truncate(path, 2**40)
    with pytest.raises(CorruptBlob, match=str(2**40)):
        disk.get(content(1).digest)


def test_a_file_has_changed_when_it_is_not_the_one_read_last(tmp_path: Path) -> None:
    disk, other = Disk(tmp_path), Disk(tmp_path)
    digest = content(1).digest
    assert not disk.has_changed(digest), "there is none"
    disk.put(content(1))
    assert disk.has_changed(digest), "nobody has read it"
    disk.get(digest)
    assert not disk.has_changed(digest)
    disk.put(content(1))
    assert not disk.has_changed(digest)
    other.receive(digest, encode(content(1)))
    assert disk.has_changed(digest)


def test_putting_again_keeps_the_file_and_makes_it_young(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.put(content(1))
    path = version_file(tmp_path, content(1).digest)
    inode = path.stat().st_ino
    os.utime(path, (1, 1))
    disk.put(content(1))
    assert path.stat().st_ino == inode
    assert disk.digests(older_than_s=60) == set()


def _write_and_die(root: str, started: str) -> None:
    def endless() -> Iterator[bytes]:
        head, weights = encode(content(1))
        yield head
        yield bytes(weights[:100])
        Path(started).touch()
        time.sleep(60)

    Disk(Path(root)).receive(content(1).digest, endless())


def test_a_killed_writer_leaves_no_version_and_its_leftover_goes(tmp_path: Path) -> None:
    started = tmp_path / "started"
    root = tmp_path / "store"
    process = SPAWN.Process(target=_write_and_die, args=(str(root), str(started)))
    process.start()
    while not started.exists():
        assert process.is_alive()
        time.sleep(0.01)
    process.kill()
    process.join()
    disk = Disk(root)
    assert disk.get(content(1).digest) is None
    assert disk.digests() == set()
    (leftover,) = root.rglob("*.tmp")
    os.utime(leftover, (1, 1))
    # Temporary entries outside the disk tier's own folders must stay: a PEFT keeper may be using
    # them.
    other = root / "demo" / "peft" / ".x.y.tmp"
    other.mkdir(parents=True)
    os.utime(other, (1, 1))
    Disk(root)
    assert not leftover.exists()
    assert other.exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield b"something"
        raise ConnectionError("gone")

    disk = Disk(tmp_path)
    with pytest.raises(ConnectionError):
        disk.receive(content(1).digest, failing())
    assert not list((tmp_path / "versions").rglob("*.*"))


@pytest.mark.parametrize("name", ["zh", "tenant/zh", "a.b-c_D", "x" * 64 + "/" + "y" * 64])
def test_records_come_back(tmp_path: Path, name: str) -> None:
    disk = Disk(tmp_path)
    disk.put_record(record(name))
    assert disk.record(name) == record(name)
    assert Disk(tmp_path).records() == {name: record(name)}
    assert disk.record("other") is None


def test_a_change_by_another_process_is_seen(tmp_path: Path) -> None:
    one, other = Disk(tmp_path), Disk(tmp_path)
    one.put_record(record())
    assert other.record("zh") == record()
    before = other.names_changed()
    one.put_record(replace(record(), revision=2))
    assert other.names_changed() != before
    assert other.record("zh") == replace(record(), revision=2)


@pytest.mark.parametrize("junk", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"record": {}, "sha256": ""}'])
def test_an_unreadable_record_is_moved_away_and_blocks_collecting(
    tmp_path: Path, junk: bytes
) -> None:
    disk = Disk(tmp_path)
    disk.put_record(record())
    disk.put_record(record("ja"))
    (tmp_path / "names" / "zh.json").write_bytes(junk)
    assert set(disk.records()) == {"ja"}
    assert disk.has_bad_records()
    disk.put_record(record())
    assert not disk.has_bad_records()
    assert set(disk.records()) == {"ja", "zh"}


def test_one_changed_character_in_a_record_is_noticed(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.put_record(record())
    path = tmp_path / "names" / "zh.json"
    path.write_bytes(path.read_bytes().replace(b'"demo"', b'"dent"'))
    assert disk.record("zh") is None


def _change_often(root: str, times: int) -> None:
    disk = Disk(Path(root))

    def bump(known: Record | None) -> Record:
        return record() if known is None else replace(known, revision=known.revision + 1)

    for _ in range(times):
        names.change(disk, None, "zh", bump, None)


def test_a_file_that_is_in_its_place_is_not_said_to_have_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, fsync = Disk(tmp_path), os.fsync

    def fails_for_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fails_for_folders)
    disk.put_record(record())
    assert Disk(tmp_path).record("zh") == record()
    assert "zh.json may not outlast a loss of power: [Errno 5]" in caplog.text


def test_no_change_is_lost_between_processes(tmp_path: Path) -> None:
    workers = [SPAWN.Process(target=_change_often, args=(str(tmp_path), 25)) for _ in range(3)]
    for worker in workers:
        worker.start()
    _change_often(str(tmp_path), 25)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    found = Disk(tmp_path).record("zh")
    assert found is not None
    assert found.revision == 100
