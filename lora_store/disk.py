"""Durable storage of adapter versions and adapter records in one folder.

Several processes may share the folder. It contains:

``versions/ab/<digest>.lora``  one immutable version in the format of `lora_store.codec`
``names/<name>.json``          one record (`adapters.record`) with its checksum
``quarantine/``                damaged files of versions and records, for inspection
``lock``                       held (flock) while records are changed or versions are deleted

Each file is written under a temporary name, synced and then renamed. Readers therefore never find
an incomplete file. Files are copied into memory, not memory-mapped. A later change of a file
therefore does not affect data that was read before.
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
    """Folder with the versions and records of LoRA adapters.

    All methods are thread-safe. They block on I/O, and raise `OSError` if the disk fails.
    """

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
        """Remove old temporary files of processes that were killed while they wrote."""
        limit = time.time() - _LEFTOVER_S
        # Remove only temporary files of versions and records. Other modules clean up all other
        # files in the folder.
        for path in chain(self._versions.glob("*/.*.tmp"), self._names.glob(".*.tmp")):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < limit:
                    path.unlink()

    # Versions.

    def has(self, digest: str) -> bool:
        return self._version_path(digest).exists()

    def find_missing(self, digests: Iterable[str]) -> list[str]:
        """Return the members of `digests` whose adapter versions are not on this disk."""
        return [digest for digest in digests if not self.has(digest)]

    def nbytes(self, digest: str) -> int:
        """Return the size in bytes of an adapter version's file; 0 if the file does not exist."""
        try:
            return self._version_path(digest).stat().st_size
        except OSError:
            return 0

    def get(self, digest: str) -> Converted | None:
        """Read and verify an adapter version. Return None if this disk does not have its file.

        If the file is damaged, move it to the quarantine folder and raise `CorruptBlob`.
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
        """Return True if an adapter version's file was replaced or modified since the last read."""
        try:
            return _identity(self._version_path(digest).stat()) != self._read_identities.get(digest)
        except OSError:
            return False

    def put(self, converted: Converted) -> None:
        """Store an adapter version, unless the disk has an undamaged copy of it."""
        with contextlib.suppress(CorruptBlob, OSError):
            if self.get(converted.digest) is not None:
                # Set the file's modification time to now, so that the garbage collector does not
                # delete the version, which is in use again. If the collector has just deleted the
                # file, utime fails and the version is written again.
                path = self._version_path(converted.digest)
                with self.lock():
                    os.utime(path)
                self._read_identities[converted.digest] = _identity(path.stat())
                return
        self.receive(converted.digest, encode(converted))

    def receive(self, digest: str, chunks: Iterable[bytes | memoryview]) -> None:
        """Write the bytes of an encoded version, for example from Redis, without verifying them.

        `get` verifies the bytes when the version is read.
        """
        path = self._version_path(digest)
        path.parent.mkdir(exist_ok=True)
        write_durably(path, chunks)

    def delete(self, digest: str, *, older_than_s: float = 0.0) -> bool:
        """Delete an adapter version, if it was last stored at least `older_than_s` seconds ago.

        Return True if the version was deleted.
        """
        path = self._version_path(digest)
        # Hold the lock during the check and the deletion. A concurrent `put` can renew the file's
        # mtime only before the check, which prevents the deletion, or after the deletion. In the
        # second case, `put` finds no file and writes the version again.
        with self.lock(), contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime <= time.time() - older_than_s:
                path.unlink()
                self._read_identities.pop(digest, None)
                return True
        return False

    def digests(self, older_than_s: float = 0.0) -> set[str]:
        """Return the digests of the adapter versions on this disk, except recently stored versions.

        Omit a version if it was last stored less than `older_than_s` seconds ago.
        """
        limit = time.time() - older_than_s
        found = set()
        for path in self._versions.glob("*/*.lora"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime <= limit:
                    found.add(path.stem)
        return found

    # Records.

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that locks the folder against other threads and processes.

        While the lock is held, no other thread or process changes records or deletes versions.
        """
        return lock_file(self._root / "lock")

    def records(self) -> dict[str, Record]:
        """Return all adapter records by the adapter's name.

        Unreadable record files are omitted, and moved to the quarantine folder. After this,
        `has_bad_records` returns True.
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
        # If quarantine has an unreadable record file of this name, the new record replaces it, so
        # delete that file. Ignore an error: the file only prevents the deletion of unused versions.
        with contextlib.suppress(OSError):
            (self._quarantine / path.name).unlink(missing_ok=True)

    def names_changed(self) -> _Identity:
        """Return (inode, size, mtime) of the folder of records.

        The mtime changes when any process writes a record. Callers poll this method, and compare
        the result with the previous result to detect changed records.
        """
        return _identity(self._names.stat())

    def has_bad_records(self) -> bool:
        """Return True if a record file was found to be unreadable and still exists.

        Such a record may refer to any version, so no version may be deleted.
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
            # Another process may have replaced the damaged file by an undamaged file just before
            # `path.replace`. In this case, move the undamaged file back.
            if _identity(target.stat()) != identity and not path.exists():
                target.replace(path)
        except FileNotFoundError:
            pass
        except OSError:
            # The disk is probably read-only, so the damaged file remains in its folder. Remember
            # this for `has_bad_records`, and continue to read the other files.
            self._has_unmovable_file = True


def _identity(status: os.stat_result) -> _Identity:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _checksum(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path`, against other processes and threads.

    If the disk is read-only, for example because the kernel has remounted it after an error, the
    existing lock file is opened for reading and locked. Records can then still be read.
    """
    try:
        # Open the file for writing, because NFS grants exclusive locks only on writable files.
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
    """Replace a file atomically by a new file that contains the bytes of `chunks`.

    The new file is synced to the disk, so it survives a power failure. If writing fails, the old
    file remains unchanged, and the temporary file is removed.
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
            # The folder could not be synced. Log the error and continue: all processes already see
            # the new file. Only a power failure could restore the old file.
            _LOG.error("%s may not outlast a loss of power: %s", path, error)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(folder)
