"""The copy of all keys in Redis, for the gateways that share it.

``api_keys``       hash: the record's JSON by id, and ``@revision``
``api_keys:used``  hash: seconds of 1970 by id

``@revision`` is drawn anew with each change, so it tells contents apart even where Redis has lost
the last changes and others followed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from gateway.errors import KeysUnavailable
from gateway.tenancy.keys.record import KeyRecord, Uses, dump, read
from lora_store import redis_url
from lora_store.primary import Primary, describe, failures, writing
from lora_store.redis_hashes import read_hash
from lora_store.refusals import Refusals

KEYS = "api_keys"
USED = "api_keys:used"
_REVISION = b"@revision"
_TIMEOUT_S = 2.0  # of each command, and to connect
_RECORDS_AT_ONCE = 256
_MAX_BYTES = 4096  # of a record; ours have some 300
# A new record never takes the place of anything: what is there may say that the key is revoked.
# One that is revoked takes the place of everything.
_PUT = """
for i = 2, #ARGV, 3 do redis.call(ARGV[i], KEYS[1], ARGV[i + 1], ARGV[i + 2]) end
redis.call('HSET', KEYS[1], '@revision', ARGV[1])
"""


class Found(NamedTuple):
    """What Redis has.

    Attributes:
        revision: None where there is none.
        records: by id.
        unread: ids under which there is something that is no record.
    """

    revision: bytes | None
    records: dict[str, KeyRecord]
    unread: set[str]


class SharedKeys:
    """Blocks. Raises KeysUnavailable when Redis does not answer in time, or refuses."""

    def __init__(self, url: str, on_refused: Callable[[], object] = lambda: None) -> None:
        """`url` in a form of `lora_store.redis_url`.

        `on_refused` is called, from a thread, for each value that does not fit.
        """
        self._primary = Primary(redis_url.parse(url), _TIMEOUT_S)
        self._refusals = Refusals(on_refused)

    def close(self) -> None:
        self._primary.close()

    def revision(self) -> bytes | None:
        with self._client() as client:
            found: bytes | None = client.hget(KEYS, _REVISION)
            return found

    def read(self) -> Found:
        with self._client() as client:
            # Before the records: what is added later comes with another revision.
            revision: bytes | None = client.hget(KEYS, _REVISION)
            stored = read_hash(client, KEYS, _RECORDS_AT_ONCE)
        stored.pop(_REVISION, None)
        found = Found(revision, {}, set())
        for name, raw in stored.items():
            key = name.decode(errors="backslashreplace")
            try:
                if len(raw) > _MAX_BYTES:
                    raise ValueError(f"{len(raw)} bytes are no record")
                found.records[key] = read(key, raw)
            except ValueError as error:
                found.unread.add(key)
                self._refusals.add(f"{KEYS} {key}", error)
        return found

    def put(self, records: Sequence[KeyRecord]) -> None:
        """Put records, all or none of each 256. See `_PUT` for what becomes of what is there."""
        with self._client() as shared, writing(shared) as client:
            for start in range(0, len(records), _RECORDS_AT_ONCE):
                arguments: list[object] = [secrets.token_hex(8)]
                for record in records[start : start + _RECORDS_AT_ONCE]:
                    command = "HSETNX" if record.revoked is None else "HSET"
                    arguments += [command, record.id, dump(record)]
                client.eval(_PUT, 1, KEYS, *arguments)

    def uses(self) -> Uses:
        """What does not fit is left out: nothing depends on it."""
        with self._client() as client:
            found = read_hash(client, USED, _RECORDS_AT_ONCE)
        return {
            key.decode(errors="backslashreplace"): int(when)
            for key, when in found.items()
            if when.isdigit() and len(when) <= 12
        }

    def put_uses(self, uses: Uses) -> None:
        with self._client() as client:
            keys = list(uses)
            for start in range(0, len(keys), _RECORDS_AT_ONCE):
                some = keys[start : start + _RECORDS_AT_ONCE]
                client.hset(USED, mapping={key: uses[key] for key in some})

    @contextmanager
    def _client(self) -> Iterator[Any]:
        try:
            with self._primary.use() as client:
                yield client
        except failures() as error:
            # Its text may hold addresses, or the sentinels' passwords.
            raise KeysUnavailable(
                f"Keys cannot be read or changed now: Redis: {describe(error)}. Try again."
            ) from error
