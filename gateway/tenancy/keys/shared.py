"""Copy of all issued keys in Redis, shared by several gateways.

``api_keys``       hash: each key's record as JSON, by id, and the field ``@revision``
``api_keys:used``  hash: time of each key's last use in seconds since 1970, by id

Each change sets ``@revision`` to a new random value. A counter would not be safe, because Redis may
lose its last change. The next change would then get the same number as the lost change, and other
processes would not notice it.
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
_TIMEOUT_S = 2.0  # timeout of each command and of each connect
_RECORDS_AT_ONCE = 256
_MAX_BYTES = 4096  # maximum size of a record; a usual record has about 300 bytes
# Lua script that stores records. The record of a valid key is stored with HSETNX, because it must
# not replace an existing record, which may be revoked. The record of a revoked key is stored with
# HSET, which replaces any existing record.
_PUT = """
for i = 2, #ARGV, 3 do redis.call(ARGV[i], KEYS[1], ARGV[i + 1], ARGV[i + 2]) end
redis.call('HSET', KEYS[1], '@revision', ARGV[1])
"""


class SharedKeysSnapshot(NamedTuple):
    """All issued keys that Redis has at one time.

    Attributes:
        revision: value of ``@revision``; None if Redis has no keys.
        records: the records of the keys, by id.
        unread: ids of keys whose value in Redis is not a valid record.
    """

    revision: bytes | None
    records: dict[str, KeyRecord]
    unread: set[str]


class SharedKeys:
    """Issued keys in Redis.

    Methods block on I/O. They raise KeysUnavailable if Redis does not answer in time, or refuses a
    command.
    """

    def __init__(self, url: str, on_refused: Callable[[], object] = lambda: None) -> None:
        """Prepare a connection to Redis. The first command opens it.

        Args:
            url: URL of Redis, in a form that `lora_store.redis_url` describes.
            on_refused: called, from a thread, for each invalid value in Redis.

        Raises:
            ValueError: the URL is invalid.
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
            # Read the revision before the records. If a record changes in between, the next poll
            # finds a new revision and reads the records again.
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
        """Store records, in atomic batches of 256.

        The record of a valid key never replaces an existing record, which may be revoked.
        """
        with self._client() as shared, write_verified(shared) as client:
            for start in range(0, len(records), _RECORDS_AT_ONCE):
                arguments: list[object] = [secrets.token_hex(8)]
                for record in records[start : start + _RECORDS_AT_ONCE]:
                    command = "HSETNX" if record.revoked is None else "HSET"
                    arguments += [command, record.id, dump(record)]
                client.eval(_PUT, 1, KEYS, *arguments)

    def uses(self) -> Uses:
        """Return the time at which each key was last used, by the key's id.

        Invalid values are omitted without a warning.
        """
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
            # Describe the error instead of quoting it: its text may contain addresses, or the
            # passwords of Redis sentinels.
            raise KeysUnavailable(
                f"Keys cannot be read or changed now: Redis: {describe(error)}. Try again."
            ) from error
