"""Storage of overrides (weights and drains of replicas) on disk and, if configured, in Redis.

``overrides.json``      file on disk, which all workers of a gateway share: a JSON object with the
                        override of each replica, by the replica's endpoint
``replica_overrides``   hash in Redis: JSON of each override, by endpoint. The field ``@revision``
                        gets a new random value with each change.

With Redis, the file is a copy of the hash, and the gateway uses the file while Redis is
unavailable. Without Redis, there is only the file. A drained replica therefore remains drained
after any restart. A hash without ``@revision`` is new, or Redis has lost its contents. In this
case, the gateway writes all overrides from its memory to the hash.
"""

from __future__ import annotations

import json
import logging
import secrets
from contextlib import suppress
from pathlib import Path

from gateway.errors import OverridesUnavailable
from gateway.scheduling.override import Override, Overrides, parse_override
from lora_store import redis_url
from lora_store.disk import lock_file, write_durably
from lora_store.primary import Primary, describe, failure_types, write_verified
from lora_store.redis_hashes import read_hash
from lora_store.refusals import RefusedValues

log = logging.getLogger(__name__)

KEY = "replica_overrides"
MAX_OVERRIDES = 1000
"""Maximum number of replicas that have an override."""
_REVISION = "@revision"
_TIMEOUT_S = 2.0
_REDIS_ERROR = "Weights and drains cannot be changed now: Redis: {}. Try again."


class OverrideCopies:
    """Overrides on disk and in Redis. `current` has the last known overrides by endpoint.

    The methods block, so call them in a thread, and only in one thread at a time. They raise
    OverridesUnavailable if the disk or Redis fails.
    """

    def __init__(self, folder: Path, url: str | None) -> None:
        self.current: Overrides = {}
        self._folder = folder
        self._file = folder / "overrides.json"
        self._primary = None if url is None else Primary(redis_url.parse(url), _TIMEOUT_S)
        self._refusals = RefusedValues()
        self._stamp: tuple[int, int] | None = None
        self._unread = ""
        self._unread_at: tuple[int, int] | None = None
        self._read_disk()

    @property
    def is_shared(self) -> bool:
        """True if the overrides are stored in Redis, where other processes may change them."""
        return self._primary is not None

    def close(self) -> None:
        if self._primary is not None:
            self._primary.close()

    def refresh(self) -> None:
        """Read the overrides from Redis, and store them in `current`.

        If Redis has lost the overrides, write `current` to Redis instead. If Redis is not
        configured, read the overrides from disk.
        """
        if self._primary is None:
            self._read_disk()
            return
        try:
            with self._primary.use() as client:
                found = read_hash(client, KEY)
                if found.pop(_REVISION.encode(), None) is None and self.current:
                    known = {
                        name: json.dumps(each.to_dict()) for name, each in self.current.items()
                    }
                    client.hset(KEY, mapping={**known, _REVISION: secrets.token_hex(8)})
                    return
        except failure_types() as error:
            raise OverridesUnavailable(_REDIS_ERROR.format(describe(error))) from error
        read = {name.decode(errors="replace"): raw for name, raw in found.items()}
        self._apply({name: each for name, raw in read.items() if (each := self._parse(name, raw))})

    def put(self, endpoint: str, override: Override | None) -> None:
        """Set the override of the replica with this endpoint.

        If `override` is None, remove the replica's override.
        """
        if self._primary is None:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with lock_file(self._folder / "lock"):
                    self._read_disk()
                    self._write(_with_change(self.current, endpoint, override))
            except OSError as error:
                raise OverridesUnavailable(
                    "Weights and drains cannot be changed now: this gateway's disk fails."
                ) from error
            return
        changed = _with_change(self.current, endpoint, override)
        try:
            with self._primary.use() as shared, write_verified(shared) as client:
                if override is None:
                    client.hdel(KEY, endpoint)
                else:
                    client.hset(KEY, endpoint, json.dumps(override.to_dict()))
                client.hset(KEY, _REVISION, secrets.token_hex(8))
        except failure_types() as error:
            raise OverridesUnavailable(_REDIS_ERROR.format(describe(error))) from error
        self._apply(changed)

    def _apply(self, found: Overrides) -> None:
        """Store overrides from Redis in `current`, and write them to disk.

        Errors of the disk are ignored.
        """
        if found == self.current:
            return
        self.current = dict(list(found.items())[:MAX_OVERRIDES])
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with lock_file(self._folder / "lock"):
                self._write(self.current)

    def _parse(self, endpoint: str, raw: bytes) -> Override | None:
        try:
            return parse_override(json.loads(raw))
        except (ValueError, RecursionError) as error:
            self._refusals.add(f"{KEY} {endpoint}", error)
            return None

    def _write(self, overrides: Overrides) -> None:
        facts = {endpoint: each.to_dict() for endpoint, each in overrides.items()}
        write_durably(self._file, [json.dumps(facts, indent=1).encode()])
        self.current = overrides

    def _read_disk(self) -> None:
        stamp = None
        try:
            stamp = self._read_stamp()
            if stamp == self._stamp:
                return
            found = json.loads(self._file.read_bytes())
            self.current = {name: parse_override(facts) for name, facts in found.items()}
            self._stamp = stamp
        except FileNotFoundError:
            return
        except (OSError, ValueError, AttributeError) as error:
            log.error("overrides of replicas in %s cannot be read: %s", self._file, error)
            self._unread = f"overrides of replicas in {self._file} cannot be read: {error}"
            self._unread_at = stamp

    def _read_stamp(self) -> tuple[int, int]:
        """Return (inode, mtime in ns) of the file. They change whenever the file is replaced."""
        status = self._file.stat()
        return status.st_ino, status.st_mtime_ns

    @property
    def unreadable(self) -> str:
        """Error of the last attempt to read the file.

        Empty if the file could be read, or if it was replaced after the error.
        """
        with suppress(OSError):
            if self._unread and self._read_stamp() == self._unread_at:
                return self._unread
        return ""


def _with_change(known: Overrides, endpoint: str, override: Override | None) -> dict[str, Override]:
    changed = {name: each for name, each in known.items() if name != endpoint}
    if override is not None:
        if len(changed) >= MAX_OVERRIDES:
            raise OverridesUnavailable(
                f"There are {MAX_OVERRIDES} overrides already; take some back."
            )
        changed[endpoint] = override
    return changed
