"""The durable tier: one folder, safe for several processes at once.

``versions/ab/<digest>.lora``  one immutable version in the form of `lora_store.codec`
``names/<name>.json``          one record (`adapters.record`) with its checksum
``quarantine/``                copies that failed verification, for whoever wants to look
``lock``                       held (flock) while records are changed

A file appears by rename after its content is on the disk, so there are no half-written ones. None
is mapped: one that changes or shrinks later harms neither what was read of it nor who reads it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import quote

from adapters.adapter import Converted
from adapters.record import Record, is_digest
from adapters.record_json import as_json, from_json
from lora_store.codec import HEADER_BYTES, CorruptBlob, decode, encode, read_header

_LOG = logging.getLogger(__name__)

_Identity = tuple[int, int, int]
_LEFTOVER_S = 3600.0


class Disk:
    """All methods block and may be called from any thread. Raises `OSError` as it comes."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._versions = root / "versions"
        self._names = root / "names"
        self._quarantine = root / "quarantine"
        for folder in (self._versions, self._names, self._quarantine):
            folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        self._read: dict[str, _Identity] = {}
        self._parsed: dict[str, tuple[_Identity, Record]] = {}
        self._kept_bad = False

    def _remove_leftovers(self) -> None:
        """Unfinished writes of processes that were killed."""
        limit = time.time() - _LEFTOVER_S
        # Of versions and records alone: what else lies in the folder has others who look after it.
        for path in chain(self._versions.glob("*/.*.tmp"), self._names.glob(".*.tmp")):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < limit:
                    path.unlink()

    # Versions.

    def has(self, digest: str) -> bool:
        return self._path(digest).exists()

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Return those of the versions that are not here."""
        return [digest for digest in digests if not self.has(digest)]

    def nbytes(self, digest: str) -> int:
        """Return the bytes of a version's file, 0 if there is none."""
        try:
            return self._path(digest).stat().st_size
        except OSError:
            return 0

    def get(self, digest: str) -> Converted | None:
        """The version, every byte of it verified in memory of its own; None when there is none.

        A bad copy is moved away and `CorruptBlob` raised.
        """
        path = self._path(digest)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        with file:
            identity = _identity(os.fstat(file.fileno()))
            size = identity[1]
            try:
                # Before memory is taken for as much as the file says that it has.
                read_header(os.pread(file.fileno(), HEADER_BYTES, 0), size, digest)
                converted = decode(file.read(size), digest)
            except CorruptBlob:
                self._move_away(path, identity)
                raise
        self._read[digest] = identity
        return converted

    def changed(self, digest: str) -> bool:
        """Whether a version's file is another than was read last, or was written to since."""
        try:
            return _identity(self._path(digest).stat()) != self._read.get(digest)
        except OSError:
            return False

    def put(self, converted: Converted) -> None:
        """Keep a version. An intact copy that is there already is left alone."""
        with contextlib.suppress(CorruptBlob, OSError):
            if self.get(converted.digest) is not None:
                # Its age counts from now on: it is wanted again. If it has just been deleted, as
                # nobody wanted it, it is written again.
                path = self._path(converted.digest)
                with self.locked():
                    os.utime(path)
                self._read[converted.digest] = _identity(path.stat())
                return
        self.receive(converted.digest, encode(converted))

    def receive(self, digest: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write an encoded version as it arrives. It is verified when it is read."""
        path = self._path(digest)
        path.parent.mkdir(exist_ok=True)
        write_durably(path, chunks)

    def delete(self, digest: str, *, older_than_s: float = 0.0) -> bool:
        """Whether it was there, and was last put so long ago."""
        path = self._path(digest)
        # Whoever puts it meanwhile makes it young, or comes after, and finds that it is gone.
        with self.locked(), contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime <= time.time() - older_than_s:
                path.unlink()
                self._read.pop(digest, None)
                return True
        return False

    def digests(self, older_than_s: float = 0.0) -> set[str]:
        """Every version here that was last put at least so long ago."""
        limit = time.time() - older_than_s
        found = set()
        for path in self._versions.glob("*/*.lora"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime <= limit:
                    found.add(path.stem)
        return found

    # Records.

    def locked(self) -> contextlib.AbstractContextManager[None]:
        """Exclude other processes and threads from changing records and deleting versions."""
        return locked(self._root / "lock")

    def records(self) -> dict[str, Record]:
        """All records. One that cannot be read is moved away, see `has_bad_records`."""
        records: dict[str, Record] = {}
        for path in self._names.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                record = self._record(path)
                if record is not None:
                    records[record.name] = record
        return records

    def record(self, name: str) -> Record | None:
        try:
            return self._record(self._record_path(name))
        except FileNotFoundError:
            return None

    def put_record(self, record: Record) -> None:
        value = as_json(record)
        content = json.dumps({"record": value, "sha256": _checksum(value)}).encode()
        path = self._record_path(record.name)
        write_durably(path, [content])
        # The record is in force: a leftover only keeps unused versions from being collected.
        with contextlib.suppress(OSError):
            (self._quarantine / path.name).unlink(missing_ok=True)

    def names_changed(self) -> _Identity:
        """Changes whenever any process puts a record."""
        return _identity(self._names.stat())

    def has_bad_records(self) -> bool:
        """Whether a record is in quarantine: then this disk does not know all that is in use."""
        return self._kept_bad or any(self._quarantine.glob("*.json"))

    def _record(self, path: Path) -> Record | None:
        identity = _identity(path.stat())
        known = self._parsed.get(path.name)
        if known is not None and known[0] == identity:
            return known[1]
        try:
            content = json.loads(path.read_bytes())
            value = content["record"]
            if content["sha256"] != _checksum(value):
                raise ValueError("checksum")
            record = from_json(value)
            if self._record_path(record.name) != path:
                raise ValueError("the record of another name")
        except (ValueError, KeyError, TypeError, RecursionError):
            self._move_away(path, identity)
            return None
        self._parsed[path.name] = (identity, record)
        return record

    def _path(self, digest: str) -> Path:
        if not is_digest(digest):
            raise ValueError(f"{digest!r} is no digest")
        return self._versions / digest[:2] / f"{digest}.lora"

    def _record_path(self, name: str) -> Path:
        return self._names / f"{quote(name, safe='')}.json"

    def _move_away(self, path: Path, identity: _Identity) -> None:
        target = self._quarantine / path.name
        try:
            path.replace(target)
            # Another process may have replaced the bad file by a good one since it was read.
            if _identity(target.stat()) != identity and not path.exists():
                target.replace(path)
        except FileNotFoundError:
            pass
        except OSError:
            self._kept_bad = True  # the disk takes no writes; what can be read of it still counts


def _identity(status: os.stat_result) -> _Identity:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds the lock file `path` against other processes and threads.

    A disk that takes no writes any more, as one that the kernel made read-only after an error, can
    still be locked: what others change is followed, from it and from Redis.
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # NFS locks what is open for writing
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def write_durably(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Replace a file as a whole. What raises here has left the old one, and nothing else."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with temporary.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        try:
            os.fsync(folder)
        except OSError as error:
            # Everybody sees the new file; only a loss of power could bring the old one back.
            _LOG.error("%s may not outlast a loss of power: %s", path, error)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(folder)
