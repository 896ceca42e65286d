"""Reading of large Redis hashes with HSCAN. HGETALL would block all other clients of Redis.

See decision 068 in docs/decisions.
"""

from __future__ import annotations

from typing import Any

FIELDS_AT_ONCE = 64
"""Default number of fields that one command reads. The value of a field has some KiB."""


def read_hash(client: Any, key: str, count: int = FIELDS_AT_ONCE) -> dict[bytes, bytes]:
    """Return all fields of a hash that exist during the entire call.

    The result is not a snapshot: a field that is added or removed during the call may be missing.
    To detect such changes, read the hash's revision before the call and compare it later.

    Args:
        client: a client of redis-py.
        key: the key of the hash.
        count: approximate number of fields that one command reads. While Redis resizes the hash, a
            command reads several times as many.
    """
    found: dict[bytes, bytes] = {}
    cursor = 0
    while True:
        cursor, some = client.hscan(key, cursor, count=count)
        found |= some
        if cursor == 0:
            return found
