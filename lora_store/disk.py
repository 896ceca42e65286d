"""The durable tier: one folder, safe for several processes at once.

``versions/ab/<digest>.lora``  one immutable version in the form of `lora_store.codec`
``names/<name>.json``          one record (`adapters.record`) with its checksum
``quarantine/``                copies that failed verification, for inspection
``lock``                       held (flock) while records are changed

Each file is written under a temporary name, synced and then renamed, so no file is half-written.
Files are not memory-mapped, so a later change to a file does not affect data that was already read.
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
    """A folder of versions and records. Methods block, work in any thread and raise `OSError`."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._versions = root / "versions"
        self._names = root / "names"
        self._quarantine = root / "quarantine"
        for folder in (self._versions, self._names, self._quarantine):
            folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        self._read_identities: dict[str, _Identity] = {}
        self._parsed: dict[str, tuple[_Identity, Record]] = {}
        self._has_unmovable_file = False

    def _remove_leftovers(self) -> None:
        """Remove unfinished writes of processes that were killed."""
        limit = time.time() - _LEFTOVER_S
        # Remove leftovers of versions and records only. Other modules clean up the rest of the
        # folder.
        for path in chain(self._versions.glob("*/.*.tmp"), self._names.glob(".*.tmp")):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < limit:
                    path.unlink()

    # Versions.

    def has(self, digest: str) -> bool:
        return self._version_path(digest).exists()

    def find_missing(self, digests: Iterable[str]) -> list[str]:
        """Return the digests whose versions are not on this disk."""
        return [digest for digest in digests if not self.has(digest)]

    def nbytes(self, digest: str) -> int:
        """Return the size of a version's file in bytes, 0 if the file does not exist."""
        try:
            return self._version_path(digest).stat().st_size
        except OSError:
            return 0

    def get(self, digest: str) -> Converted | None:
        """Read and verify a version. Return None if it is not on this disk.

        Raise `CorruptBlob` for a damaged copy, after moving it to quarantine.
        """
        path = self._version_path(digest)
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        with file:
            identity = _identity(os.fstat(file.fileno()))
            size = identity[1]
            try:
                # Check the header before allocating as much memory as the file's size.
                read_header(os.pread(file.fileno(), HEADER_BYTES, 0), size, digest)
                converted = decode(file.read(size), digest)
            except CorruptBlob:
                self._move_to_quarantine(path, identity)
                raise
        self._read_identities[digest] = identity
        return converted

    def has_changed(self, digest: str) -> bool:
        """Return True if a version's file was replaced or written to since it was last read."""
        try:
            return _identity(self._version_path(digest).stat()) != self._read_identities.get(digest)
        except OSError:
            return False

    def put(self, converted: Converted) -> None:
        """Store a version, unless an intact copy exists."""
        with contextlib.suppress(CorruptBlob, OSError):
            if self.get(converted.digest) is not None:
                # Set the file's time to now, because the version is in use again and the collector
                # must not delete it. If the collector has just deleted the file, utime fails and
                # the version is written again.
                path = self._version_path(converted.digest)
                with self.lock():
                    os.utime(path)
                self._read_identities[converted.digest] = _identity(path.stat())
                return
        self.receive(converted.digest, encode(converted))

    def receive(self, digest: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write an encoded version without verifying it; `get` verifies it later."""
        path = self._version_path(digest)
        path.parent.mkdir(exist_ok=True)
        write_durably(path, chunks)

    def delete(self, digest: str, *, older_than_s: float = 0.0) -> bool:
        """Delete a version that was last put at least `older_than_s` ago. Return True if it was
        deleted.
        """
        path = self._version_path(digest)
        # Under the lock, a concurrent put either renews the file's time before this check, or runs
        # after it and writes the deleted version again.
        with self.lock(), contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime <= time.time() - older_than_s:
                path.unlink()
                self._read_identities.pop(digest, None)
                return True
        return False

    def digests(self, older_than_s: float = 0.0) -> set[str]:
        """Return the digests of versions that were last put at least `older_than_s` ago."""
        limit = time.time() - older_than_s
        found = set()
        for path in self._versions.glob("*/*.lora"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime <= limit:
                    found.add(path.stem)
        return found

    # Records.

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager. While it is entered, no other thread or process changes records
        or deletes versions.
        """
        return lock_file(self._root / "lock")

    def records(self) -> dict[str, Record]:
        """Return all records by name. Unreadable records are moved to quarantine and left out;
        `has_bad_records` then returns True.
        """
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
        # Remove the name's unreadable record from quarantine. An error is ignored: the new record
        # is already stored, and the leftover only delays the deletion of unused versions.
        with contextlib.suppress(OSError):
            (self._quarantine / path.name).unlink(missing_ok=True)

    def names_changed(self) -> _Identity:
        """Return a value that changes whenever any process puts a record."""
        return _identity(self._names.stat())

    def has_bad_records(self) -> bool:
        """Return True if a record is in quarantine. The versions that it names are unknown, so any
        version may be in use.
        """
        return self._has_unmovable_file or any(self._quarantine.glob("*.json"))

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
            self._move_to_quarantine(path, identity)
            return None
        self._parsed[path.name] = (identity, record)
        return record

    def _version_path(self, digest: str) -> Path:
        if not is_digest(digest):
            raise ValueError(f"{digest!r} is no digest")
        return self._versions / digest[:2] / f"{digest}.lora"

    def _record_path(self, name: str) -> Path:
        return self._names / f"{quote(name, safe='')}.json"

    def _move_to_quarantine(self, path: Path, identity: _Identity) -> None:
        target = self._quarantine / path.name
        try:
            path.replace(target)
            # Move the file back if it is not the damaged one: another process may have replaced the
            # damaged file by a good one since it was read.
            if _identity(target.stat()) != identity and not path.exists():
                target.replace(path)
        except FileNotFoundError:
            pass
        except OSError:
            # The disk is probably read-only: remember the bad file, and continue to read the other
            # files.
            self._has_unmovable_file = True


def _identity(status: os.stat_result) -> _Identity:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, against other processes and threads.

    On a disk that the kernel remounted read-only after an error, the existing lock file is opened
    for reading and locked. Records can then still be read.
    """
    try:
        # Open for writing: NFS grants exclusive locks only on such files.
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
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
    """Replace a file atomically with the content `chunks`. On an error, the old file remains
    unchanged and no temporary file is left.
    """
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
            # Log the error and continue: all processes see the new file already, and only a power
            # failure could restore the old one.
            _LOG.error("%s may not outlast a loss of power: %s", path, error)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(folder)
