"""Overrides on disk, and in Redis where gateways share one.

``overrides.json``      on disk, for all processes that share it: an object by endpoint
``replica_overrides``   in Redis, a hash: JSON by endpoint, and ``@revision``

Redis has them, and the disk a copy for while it is away: without a Redis the disk has them. A
replica that is drained stays so, whatever is started anew. A hash without ``@revision`` is one that
Redis has lost, or never had: it is given what is known here.
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
MOST = 1000
"""More would be no replicas any more."""
_REVISION = "@revision"
_TIMEOUT_S = 2.0
_AWAY = "Weights and drains cannot be changed now: Redis: {}. Try again."


class OverrideCopies:
    """Blocks; for one thread at a time. Methods raise OverridesUnavailable."""

    def __init__(self, folder: Path, url: str | None) -> None:
        self.current: Overrides = {}
        self._folder = folder
        self._file = folder / "overrides.json"
        self._primary = None if url is None else Primary(redis_url.parse(url), _TIMEOUT_S)
        self._refusals = RefusedValues()
        self._stamp: tuple[int, int] | None = None
        self._unread = ""
        self._unread_at: tuple[int, int] | None = None
        self._from_disk()

    @property
    def shared(self) -> bool:
        """Whether others may change them."""
        return self._primary is not None

    def close(self) -> None:
        if self._primary is not None:
            self._primary.close()

    def look(self) -> None:
        """Takes over what others have said."""
        if self._primary is None:
            self._from_disk()
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
            raise OverridesUnavailable(_AWAY.format(describe(error))) from error
        read = {name.decode(errors="replace"): raw for name, raw in found.items()}
        self._take({name: each for name, raw in read.items() if (each := self._read(name, raw))})

    def put(self, endpoint: str, override: Override | None) -> None:
        """None takes it back."""
        if self._primary is None:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                with lock_file(self._folder / "lock"):
                    self._from_disk()
                    self._write(_changed(self.current, endpoint, override))
            except OSError as error:
                raise OverridesUnavailable(
                    "Weights and drains cannot be changed now: this gateway's disk fails."
                ) from error
            return
        changed = _changed(self.current, endpoint, override)
        try:
            with self._primary.use() as shared, write_verified(shared) as client:
                if override is None:
                    client.hdel(KEY, endpoint)
                else:
                    client.hset(KEY, endpoint, json.dumps(override.to_dict()))
                client.hset(KEY, _REVISION, secrets.token_hex(8))
        except failure_types() as error:
            raise OverridesUnavailable(_AWAY.format(describe(error))) from error
        self._take(changed)

    def _take(self, found: Overrides) -> None:
        """What Redis has; a disk that fails keeps nothing from being in force."""
        if found == self.current:
            return
        self.current = dict(list(found.items())[:MOST])
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with lock_file(self._folder / "lock"):
                self._write(self.current)

    def _read(self, endpoint: str, raw: bytes) -> Override | None:
        try:
            return parse_override(json.loads(raw))
        except (ValueError, RecursionError) as error:
            self._refusals.add(f"{KEY} {endpoint}", error)
            return None

    def _write(self, overrides: Overrides) -> None:
        facts = {endpoint: each.to_dict() for endpoint, each in overrides.items()}
        write_durably(self._file, [json.dumps(facts, indent=1).encode()])
        self.current = overrides

    def _from_disk(self) -> None:
        stamp = None
        try:
            stamp = self._seen()
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

    def _seen(self) -> tuple[int, int]:
        """A stamp that differs from one content of the copy on disk to the next."""
        status = self._file.stat()
        return status.st_ino, status.st_mtime_ns

    @property
    def unreadable(self) -> str:
        """The error of reading the copy on disk, while that copy is there; else empty."""
        with suppress(OSError):
            if self._unread and self._seen() == self._unread_at:
                return self._unread
        return ""


def _changed(known: Overrides, endpoint: str, override: Override | None) -> dict[str, Override]:
    changed = {name: each for name, each in known.items() if name != endpoint}
    if override is not None:
        if len(changed) >= MOST:
            raise OverridesUnavailable(f"There are {MOST} overrides already; take some back.")
        changed[endpoint] = override
    return changed
