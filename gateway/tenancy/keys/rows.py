"""Rows of the issued API keys, in the table `api_keys`.

A row changes in three columns only: `used` gets later times, `revoked` is set once, and `change` is
the change number of the row's creation or revocation.

See decision 091 in docs/decisions.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from pydantic import ValidationError

from gateway.database.changes import raise_number
from gateway.database.connection import Connection
from gateway.tenancy.keys.record import KeyRecord, Uses

log = logging.getLogger(__name__)

CHANGES = "keys"
"""Name of the change number of the keys."""
_COLUMNS = "hash, tenant, note, created, created_by, expires, revoked"


async def read_changed(connection: Connection, after: int) -> list[KeyRecord]:
    """Return the keys that have changed after the change number `after`.

    Rows that this release cannot read are omitted and logged.
    """
    rows = await connection.fetch(
        f"SELECT id, {_COLUMNS} FROM api_keys WHERE change > $1 ORDER BY change", after
    )
    found: list[KeyRecord] = []
    for key_id, *columns in rows:
        try:
            found.append(KeyRecord(**dict(zip(KeyRecord.model_fields, columns, strict=True))))
        except ValidationError as error:
            # Do not quote the error: its text has the hash.
            count = error.error_count()
            log.error("key %r in the database is ignored: %d invalid fields", key_id, count)
    return found


async def insert_keys(connection: Connection, records: Iterable[KeyRecord]) -> None:
    """Add keys. If a key exists already, it is only revoked if the record is revoked."""
    change = await raise_number(connection, CHANGES)
    # Change rows in the order of their ids: two processes would otherwise wait for each other.
    await connection.execute_many(
        f"INSERT INTO api_keys ({_COLUMNS}, id, change)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)"
        " ON CONFLICT (id) DO UPDATE SET revoked = excluded.revoked, change = excluded.change"
        " WHERE api_keys.revoked IS NULL AND excluded.revoked IS NOT NULL",
        [
            (*[getattr(each, name) for name in KeyRecord.model_fields], each.id, change)
            for each in sorted(records, key=lambda record: record.id)
        ],
    )


async def revoke_keys(connection: Connection, revoked: Mapping[str, int]) -> None:
    """Revoke keys. `revoked` has the times in seconds since 1970, by the key's id."""
    change = await raise_number(connection, CHANGES)
    await connection.execute_many(
        "UPDATE api_keys SET revoked = $2, change = $3 WHERE id = $1 AND revoked IS NULL",
        [(key_id, when, change) for key_id, when in sorted(revoked.items())],
    )


async def read_uses(connection: Connection) -> dict[str, int]:
    """Return the last use of each key that is not revoked, in seconds since 1970, by id."""
    rows = await connection.fetch(
        "SELECT id, used FROM api_keys WHERE used IS NOT NULL AND revoked IS NULL"
    )
    return dict(map(tuple, rows))


async def write_uses(connection: Connection, uses: Uses) -> None:
    """Store times of use that are later than the stored ones. Unknown keys are omitted."""
    await connection.execute_many(
        "UPDATE api_keys SET used = $2 WHERE id = $1 AND (used IS NULL OR used < $2)",
        sorted(uses.items()),
    )
