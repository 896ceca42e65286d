"""Copy of all issued keys on disk, in a folder that processes on one machine may share.

``keys.json``  the records of the keys
``used.json``  the last use of each key
``lock``       locked with flock while a file is changed

A change writes a new file, syncs it to the disk, and then replaces the old file atomically.
"""

from __future__ import annotations

import json
import logging
from contextlib import AbstractContextManager
from pathlib import Path

from gateway.tenancy.keys.record import Records, Uses, dump_all, parse_records, parse_uses
from lora_store.disk import lock_file, write_durably

log = logging.getLogger(__name__)

Stamp = tuple[int, int, int] | None
"""Inode, size and modification time in ns of ``keys.json``; None if the file cannot be read.

Callers poll this stamp to detect that another process has replaced the file.
"""


class KeyDisk:
    """Files of the issued keys in one folder.

    Methods block on I/O. If the disk fails, they raise OSError, except `stamp` and `uses`.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._records = folder / "keys.json"
        self._uses = folder / "used.json"
        self._lock_path = folder / "lock"
        self._broken = ""

    def lock(self) -> AbstractContextManager[None]:
        """Return a context manager that locks the files against other processes and threads."""
        return lock_file(self._lock_path)

    def stamp(self) -> Stamp:
        try:
            status = self._records.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def records(self) -> Records:
        """Return the records by id.

        If the file is corrupt, rename it to ``keys.broken`` and return an empty dict.
        """
        try:
            return parse_records(self._records.read_bytes())
        except FileNotFoundError:
            return {}
        except ValueError as error:
            aside = self._records.with_suffix(".broken")
            log.error("the keys in %s cannot be read, see %s: %s", self._records, aside, error)
            self._broken = f"the keys in {self._records} could not be read, see {aside}: {error}"
            self._records.replace(aside)
            return {}

    @property
    def problem(self) -> str:
        """Error text while a corrupt file ``keys.broken`` exists, else ""."""
        if self._broken and not self._records.with_suffix(".broken").exists():
            self._broken = ""
        return self._broken

    def put(self, records: Records) -> None:
        write_durably(self._records, [dump_all(records)])

    def uses(self) -> Uses:
        """Return the last use of each key.

        Return an empty mapping if the file cannot be read, because last uses are not essential.
        """
        try:
            return parse_uses(self._uses.read_bytes())
        except (OSError, ValueError):
            return {}

    def put_uses(self, uses: Uses) -> None:
        write_durably(self._uses, [json.dumps(uses).encode()])
