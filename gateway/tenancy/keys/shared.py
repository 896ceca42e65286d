"""The copy of all keys in Redis, for the gateways that share it.

``api_keys``       hash: the record's JSON by id, and ``@revision``
``api_keys:used``  hash: seconds of 1970 by id

``@revision`` is random with each change, so different contents have different revisions, even after
Redis has lost the last changes and others followed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from gateway.errors import KeysUnavailable
from gateway.tenancy.keys.record import KeyRecord, Uses, dump, parse_record
from lora_store import redis_url
from lora_store.primary import Primary, describe, failure_types, write_verified
from lora_store.redis_hashes import read_hash
from lora_store.refusals import RefusedValues

KEYS = "api_keys"
USED = "api_keys:used"
_REVISION = b"@revision"
_TIMEOUT_S = 2.0  # of each command, and to connect
_RECORDS_AT_ONCE = 256
_MAX_BYTES = 4096  # of a record; the gateway's own have about 300
# A new record never replaces another one: the stored one may be revoked. A revoked record replaces
# any.
_PUT = """
for i = 2, #ARGV, 3 do redis.call(ARGV[i], KEYS[1], ARGV[i + 1], ARGV[i + 2]) end
redis.call('HSET', KEYS[1], '@revision', ARGV[1])
"""


class SharedKeysSnapshot(NamedTuple):
    """The content of Redis.

    Attributes:
        revision: None if Redis has no revision.
        records: by id.
        unread: ids of values that are no valid records.
    """

    revision: bytes | None
    records: dict[str, KeyRecord]
    unread: set[str]


class SharedKeys:
    """The keys in Redis. Blocks. Methods raise KeysUnavailable if Redis is slow, or refuses."""

    def __init__(self, url: str, on_refused: Callable[[], object] = lambda: None) -> None:
        """Connect with the first command.

        Args:
            url: in a form of `lora_store.redis_url`.
            on_refused: called, from a thread, for each invalid value.

        Raises:
            ValueError: the URL has another form.
        """
        self._primary = Primary(redis_url.parse(url), _TIMEOUT_S)
        self._refusals = RefusedValues(on_refused)

    def close(self) -> None:
        self._primary.close()

    def revision(self) -> bytes | None:
        with self._client() as client:
            found: bytes | None = client.hget(KEYS, _REVISION)
            return found

    def read(self) -> SharedKeysSnapshot:
        with self._client() as client:
            # Read the revision before the records: later changes come with another revision.
            revision: bytes | None = client.hget(KEYS, _REVISION)
            stored = read_hash(client, KEYS, _RECORDS_AT_ONCE)
        stored.pop(_REVISION, None)
        found = SharedKeysSnapshot(revision, {}, set())
        for name, raw in stored.items():
            key = name.decode(errors="backslashreplace")
            try:
                if len(raw) > _MAX_BYTES:
                    raise ValueError(f"{len(raw)} bytes are no record")
                found.records[key] = parse_record(key, raw)
            except ValueError as error:
                found.unread.add(key)
                self._refusals.add(f"{KEYS} {key}", error)
        return found

    def put(self, records: Sequence[KeyRecord]) -> None:
        """Store records, all or none of each 256. See `_PUT` for existing records."""
        with self._client() as shared, write_verified(shared) as client:
            for start in range(0, len(records), _RECORDS_AT_ONCE):
                arguments: list[object] = [secrets.token_hex(8)]
                for record in records[start : start + _RECORDS_AT_ONCE]:
                    command = "HSETNX" if record.revoked is None else "HSET"
                    arguments += [command, record.id, dump(record)]
                client.eval(_PUT, 1, KEYS, *arguments)

    def uses(self) -> Uses:
        """Return the last uses without invalid values: nothing depends on them."""
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
        except failure_types() as error:
            # The error's text may contain addresses, or the sentinels' passwords.
            raise KeysUnavailable(
                f"Keys cannot be read or changed now: Redis: {describe(error)}. Try again."
            ) from error
