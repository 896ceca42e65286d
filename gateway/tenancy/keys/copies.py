"""Synchronisation of the issued API keys between this process' memory, the disk and Redis.

These are three copies of the keys. To join copies means to merge their records, and to store the
result in each of them.

If Redis is configured, a process must read Redis once before it accepts issued keys: another
gateway may have revoked a key that is still valid on this disk. After this, the process accepts
issued keys even while Redis is down. It also creates a marker file in the folder of the gateway's
workers. A worker that starts later finds the marker, and accepts the keys on the disk at once.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from gateway.errors import KeyNotFound, KeysUnavailable
from gateway.tenancy.keys.disk import KeyDisk, Stamp
from gateway.tenancy.keys.record import KeyRecord, Records, Uses, join_records, merge_uses
from gateway.tenancy.keys.shared import SharedKeys, SharedKeysSnapshot

_NEVER = (0, 0, 0)


class KeyCopies:
    """All issued keys, synchronised between this process, the disk and Redis.

    Methods block on I/O; call them from one thread at a time. They raise KeysUnavailable if Redis
    does not answer, and OSError if the disk fails.

    Attributes:
        records: the records of all keys that this process knows, by id.
        trusted: True if the keys in `records` may be accepted. The module's docstring describes
            when this is safe.
    """

    def __init__(self, disk: KeyDisk, shared: SharedKeys | None, workers: Path | None) -> None:
        """Create the object without reading any keys; `poll` reads them.

        Args:
            disk: the copy on disk.
            shared: the copy in Redis; None without Redis.
            workers: folder that all workers of the gateway share; None without workers.
        """
        self._disk = disk
        self._shared = shared
        self._mark = None if workers is None else workers / "keys-are-known"
        self._joined_at: tuple[bytes | None, Stamp] | None = None
        """Values of `SharedKeys.revision` and `KeyDisk.stamp` after the copies were last joined.

        `poll` joins the copies again if a value has changed, or if the attribute is None.
        """
        self._joined_disk_at: Stamp = _NEVER
        self.records: Records = {}
        self.trusted = False

    @property
    def disk_problem(self) -> str:
        return self._disk.problem

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()

    def poll(self) -> None:
        """Join the copies if the keys in Redis or on disk may have changed.

        If Redis is down, join only the copies in this process and on disk, and raise
        KeysUnavailable.
        """
        stamp = self._disk.stamp()
        try:
            revision = None if self._shared is None else self._shared.revision()
            if self._joined_at != (revision, stamp):
                self._join(self._shared)
        except KeysUnavailable:
            if stamp != self._joined_disk_at:
                self._join(None)
            raise

    def add(self, record: KeyRecord) -> None:
        """Add a new key to all copies."""
        self._join(self._shared, record)

    def revoke(self, key_id: str, now: int) -> None:
        """Revoke a key. Do nothing if the key is revoked already.

        Args:
            key_id: the key's id.
            now: the time of the revocation, in seconds since 1970.

        Raises:
            KeyNotFound: the id is unknown.
            KeysUnavailable: Redis does not answer. If the key was known, it is revoked for all
                processes that share this disk. Other gateways revoke it once Redis answers again.
        """
        if key_id not in self.records:
            with contextlib.suppress(OSError):
                self._join(self._shared)  # read the copies: another process may have added the key
        record = self.records.get(key_id)
        if record is None:
            raise KeyNotFound(key_id)
        # Revoke the key in this process first: it must be revoked even if Redis or the disk fails.
        self.records = join_records(self.records, [record.model_copy(update={"revoked": now})])
        try:
            self._join(self._shared)
        except KeysUnavailable:
            self._joined_at = None
            self._join(None)
            raise KeysUnavailable(
                "The key has ended on this gateway. The others learn of it once Redis answers "
                "again and may accept it until then: try again."
            ) from None

    def uses(self) -> Uses:
        """Return the time at which each key was last used, as stored in Redis and on disk."""
        shared: Uses = {}
        if self._shared is not None:
            with contextlib.suppress(KeysUnavailable):
                shared = self._shared.uses()
        return merge_uses(self._disk.uses(), shared)

    def put_uses(self, new: Uses) -> None:
        """Store the times at which keys were last used, first in Redis, then on disk.

        Redis comes first, so that other gateways get these times even if this disk fails.
        """
        if self._shared is not None:
            self._shared.put_uses(new)
        with self._disk.lock():
            known = merge_uses(self._disk.uses(), new)
            self._disk.put_uses({key: when for key, when in known.items() if key in self.records})

    def _join(self, shared: SharedKeys | None, *new: KeyRecord) -> None:
        """Join the copies in this process, on disk and in Redis, and add the records `new` to all.

        If `shared` is None, Redis is neither read nor written. If the disk fails, the copies in
        this process and in Redis are joined before OSError is raised.
        """
        known: Records = join_records(self.records, new)
        with contextlib.suppress(OSError), self._disk.lock():
            known = join_records(known, self._disk.records().values())
        revision: bytes | None = None
        missing: list[KeyRecord] = []
        if shared is not None:
            found = shared.read()
            revision, known = found.revision, join_records(known, found.records.values())
            missing = [record for record in known.values() if _is_missing(record, found)]
            if missing:
                shared.put(missing)
            self._mark_trusted()
        self.records = known
        with self._disk.lock():
            local = self._disk.records()
            self.records = join_records(known, local.values())
            if self._shared is None or (self._mark is not None and self._mark.exists()):
                self.trusted = True
            if self.records != local:
                self._disk.put(self.records)
            self._joined_disk_at = self._disk.stamp()
        if shared is self._shared:
            # If records were written to Redis, let the next poll join the copies again: this
            # repeats the write if Redis has lost these records since then.
            self._joined_at = None if missing else (revision, self._joined_disk_at)

    def _mark_trusted(self) -> None:
        if not self.trusted and self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.touch()
        self.trusted = True


def _is_missing(record: KeyRecord, found: SharedKeysSnapshot) -> bool:
    """Return True if the record must be written to Redis.

    Redis may have a value that this gateway cannot read, perhaps from a newer release. The record
    of a revoked key replaces this value. The record of a valid key does not.
    """
    there = found.records.get(record.id)
    if record.revoked is not None:
        return there is None or there.revoked is None
    return there is None and record.id not in found.unread
