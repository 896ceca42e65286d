"""The keys that this process knows, synchronised with the disk and with Redis.

*Trust.* A process that shares Redis with others accepts no key before it has read Redis: its disk
may be older than another gateway's revocation. After that, its keys remain valid while Redis is
down. A file in the gateway's common folder tells later workers that the disk is trusted: the other
workers have updated it.
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
    """The joined copies of all keys. Blocks; use from one thread at a time.

    Methods raise KeysUnavailable if Redis does not answer, and OSError if the disk fails.
    """

    def __init__(self, disk: KeyDisk, shared: SharedKeys | None, workers: Path | None) -> None:
        """Use these copies; `workers` is the folder that all workers of a gateway share."""
        self._disk = disk
        self._shared = shared
        self._mark = None if workers is None else workers / "keys-are-known"
        self._joined_at: tuple[bytes | None, Stamp] | None = None
        """Revision of Redis and stamp of the disk at the last join; None forces a join."""
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
        """Join all copies if one may have changed. If Redis is down, join the disk alone."""
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
        """Revoke a key, which may be revoked already. Raise KeyNotFound for an unknown id.

        On KeysUnavailable, a known key is revoked for all processes that share this disk; the
        others learn of it as soon as Redis is back.
        """
        if key_id not in self.records:
            with contextlib.suppress(OSError):
                self._join(self._shared)  # it may have been made elsewhere a moment ago
        record = self.records.get(key_id)
        if record is None:
            raise KeyNotFound(key_id)
        # Revoke here first, whatever fails below.
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
        """Return the last uses that Redis and the disk have."""
        shared: Uses = {}
        if self._shared is not None:
            with contextlib.suppress(KeysUnavailable):
                shared = self._shared.uses()
        return merge_uses(self._disk.uses(), shared)

    def put_uses(self, new: Uses) -> None:
        """Store uses in Redis first: others read them from Redis, even while this disk fails."""
        if self._shared is not None:
            self._shared.put_uses(new)
        with self._disk.lock():
            known = merge_uses(self._disk.uses(), new)
            self._disk.put_uses({key: when for key, when in known.items() if key in self.records})

    def _join(self, shared: SharedKeys | None, *new: KeyRecord) -> None:
        """Write everything known here, on disk, in `shared` and in `new` to all of these copies.

        A failing disk does not prevent keys of Redis from being known here.
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
            # After a change, read Redis again: it may lose the change, too.
            self._joined_at = None if missing else (revision, self._joined_disk_at)

    def _mark_trusted(self) -> None:
        if not self.trusted and self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.touch()
        self.trusted = True


def _is_missing(record: KeyRecord, found: SharedKeysSnapshot) -> bool:
    """Return True if Redis lacks the record.

    An unreadable value may be a newer release's, so it counts as present unless the key is revoked.
    """
    there = found.records.get(record.id)
    if record.revoked is not None:
        return there is None or there.revoked is None
    return there is None and record.id not in found.unread
