"""Large hashes of Redis, read in parts: HGETALL of all would block every client of Redis.

See decision 068 in docs/decisions.
"""

from __future__ import annotations

from typing import Any

FIELDS_AT_ONCE = 64
"""Fields that one command reads, of some KiB each."""


def read_hash(client: Any, key: str, count: int = FIELDS_AT_ONCE) -> dict[bytes, bytes]:
    """Return all fields of a hash that exist during the entire call.

    The fields are not of one moment: a field that is added or removed during the call may be
    missing. A caller that needs to know reads the hash's revision before.

    Args:
        client: a client of redis-py.
        key: the hash.
        count: fields that one command reads; several times as many while Redis resizes the hash.
    """
    found: dict[bytes, bytes] = {}
    cursor = 0
    while True:
        cursor, some = client.hscan(key, cursor, count=count)
        found |= some
        if cursor == 0:
            return found
