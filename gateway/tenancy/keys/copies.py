"""All keys as this process knows them, kept the same as on disk and in Redis.

*What is trusted.* A process that shares Redis with others takes no key before it has seen what
Redis has: its disk may be from before another gateway revoked one. From then on, what it knows is
good while Redis is away. Workers that start later are told so by a file in the folder of their
gateway: the others have kept the disk as new as they are.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from gateway.errors import KeyNotFound, KeysUnavailable
from gateway.tenancy.keys.disk import KeyDisk, Stamp
from gateway.tenancy.keys.record import KeyRecord, Records, Uses, joined, latest
from gateway.tenancy.keys.shared import Found, SharedKeys

_NEVER = (0, 0, 0)


class KeyCopies:
    """Blocks; for one thread at a time.

    Raises KeysUnavailable where Redis does not answer, and OSError where the disk fails.
    """

    def __init__(self, disk: KeyDisk, shared: SharedKeys | None, workers: Path | None) -> None:
        """`workers` is the folder that all workers of a gateway share."""
        self._disk = disk
        self._shared = shared
        self._mark = None if workers is None else workers / "keys-are-known"
        self._seen: tuple[bytes | None, Stamp] | None = None
        """What Redis and the disk were at when they were joined last; None if they are to be joined
        whatever they are at."""
        self._seen_disk: Stamp = _NEVER
        self.records: Records = {}
        self.trusted = False

    @property
    def disk_problem(self) -> str:
        return self._disk.problem

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()

    def look(self) -> None:
        """Joins all copies if one of them may have changed; the one on disk if Redis is away."""
        stamp = self._disk.stamp()
        try:
            revision = None if self._shared is None else self._shared.revision()
            if self._seen != (revision, stamp):
                self._join(self._shared)
        except KeysUnavailable:
            if stamp != self._seen_disk:
                self._join(None)
            raise

    def add(self, record: KeyRecord) -> None:
        """A new key."""
        self._join(self._shared, record)

    def revoke(self, key_id: str, now: int) -> None:
        """Once revoked, it may be revoked again. Raises KeyNotFound for an id of no key.

        With KeysUnavailable, a key that is known here has ended for whoever shares this disk, and
        the others are told as soon as Redis is back.
        """
        if key_id not in self.records:
            with contextlib.suppress(OSError):
                self._join(self._shared)  # it may have been made elsewhere a moment ago
        record = self.records.get(key_id)
        if record is None:
            raise KeyNotFound(key_id)
        # Whatever fails below, it has ended here.
        self.records = joined(self.records, [record.model_copy(update={"revoked": now})])
        try:
            self._join(self._shared)
        except KeysUnavailable:
            self._seen = None
            self._join(None)
            raise KeysUnavailable(
                "The key has ended on this gateway. The others are told once Redis answers again "
                "and may take it until then: try again."
            ) from None

    def uses(self) -> Uses:
        """As far as Redis and the disk know."""
        shared: Uses = {}
        if self._shared is not None:
            with contextlib.suppress(KeysUnavailable):
                shared = self._shared.uses()
        return latest(self._disk.uses(), shared)

    def put_uses(self, new: Uses) -> None:
        """To Redis first: others read it there, also while this disk keeps nothing."""
        if self._shared is not None:
            self._shared.put_uses(new)
        with self._disk.locked():
            known = latest(self._disk.uses(), new)
            self._disk.put_uses({key: when for key, when in known.items() if key in self.records})

    def _join(self, shared: SharedKeys | None, *new: KeyRecord) -> None:
        """What is known here, on disk and in `shared`, and `new`: all of it in all of them.

        A disk that fails keeps nothing that Redis tells from being known here.
        """
        known: Records = joined(self.records, new)
        with contextlib.suppress(OSError), self._disk.locked():
            known = joined(known, self._disk.records().values())
        revision: bytes | None = None
        missing: list[KeyRecord] = []
        if shared is not None:
            found = shared.read()
            revision, known = found.revision, joined(known, found.records.values())
            missing = [record for record in known.values() if _is_missing(record, found)]
            if missing:
                shared.put(missing)
            self._trust()
        self.records = known
        with self._disk.locked():
            local = self._disk.records()
            self.records = joined(known, local.values())
            if self._shared is None or (self._mark is not None and self._mark.exists()):
                self.trusted = True
            if self.records != local:
                self._disk.put(self.records)
            self._seen_disk = self._disk.stamp()
        if shared is self._shared:
            # What Redis has after a change is looked at again: it may lose that, too.
            self._seen = None if missing else (revision, self._seen_disk)

    def _trust(self) -> None:
        if not self.trusted and self._mark is not None:
            with contextlib.suppress(OSError):
                self._mark.touch()
        self.trusted = True


def _is_missing(record: KeyRecord, found: Found) -> bool:
    """Whether Redis lacks it. What is there and cannot be read is left alone, unless the key is
    revoked: a newer release may have written it."""
    there = found.records.get(record.id)
    if record.revoked is not None:
        return there is None or there.revoked is None
    return there is None and record.id not in found.unread
