"""The schema's version, and its migration.

A migration is a file of SQL statements in the folder `migrations`, which both SQLite and PostgreSQL
understand. Its name is its number, with leading zeros. A further file may have the statements for
one of them only: 0001.postgresql.sql. A migration must leave a schema that the
release before still works with: it adds tables, columns with defaults and indexes, and removes only
what no supported release reads. The schema is therefore upgraded before the gateways of a fleet.
Statements name their columns, because a newer schema may have more.

See decision 097 in docs/decisions.
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path

from gateway.database.connection import Connection
from gateway.database.database import SchemaMismatch

_FOLDER = Path(__file__).with_name("migrations")
VERSIONS = sorted({file.name.partition(".")[0] for file in _FOLDER.glob("[0-9]*.sql")})
"""Numbers of all migrations of this release. The last one is the version of its schema."""
OLDEST = "0001"
"""The oldest version of the schema that this release works with."""
READABLE_FROM = "0001"
"""The version of the schema of the oldest release that works with this release's schema.

The database has it as the fact `readable_from`, for gateways of older releases.
"""
_LOCK_ID = 0x7A17_6A7E  # of PostgreSQL's advisory lock that a migration holds
_LOCK_TIMEOUT = "10s"
_COMMENT = re.compile(r"--.*")


async def read_version(connection: Connection) -> str | None:
    """Return the schema's version. Return None if the database has no tables of a gateway."""
    exists = "SELECT name FROM sqlite_master WHERE name = 'facts'"
    if connection.is_postgresql:
        # Not to_regclass: it may be out of date after a wait for an advisory lock.
        exists = "SELECT relname FROM pg_class WHERE relname = 'facts' AND pg_table_is_visible(oid)"
    if await connection.fetch_value(exists) is None:
        return None
    version: str | None = await read_fact(connection, "schema")
    return version


async def _read_readable_from(connection: Connection) -> str:
    return await read_fact(connection, "readable_from") or "9999"


async def read_fact(connection: Connection, name: str) -> str | None:
    """Return a value of the table `facts`; None if it does not exist."""
    found: str | None = await connection.fetch_value("SELECT value FROM facts WHERE name=$1", name)
    return found


async def write_fact(connection: Connection, name: str, value: str) -> None:
    await connection.fetch(
        "INSERT INTO facts (name, value) VALUES ($1, $2)"
        " ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        *(name, value),
    )


async def check(connection: Connection) -> None:
    """Raise SchemaMismatch if this release does not work with the database's schema."""
    version = await read_version(connection)
    if version is None:
        raise SchemaMismatch("the database is empty; run `gateway database upgrade`")
    if version > VERSIONS[-1] and await _read_readable_from(connection) > VERSIONS[-1]:
        raise SchemaMismatch(
            f"the schema of the database has version {version}, and this release knows "
            f"{VERSIONS[-1]} at most; run a newer release of the gateway"
        )
    if version < OLDEST:
        raise SchemaMismatch(
            f"the schema of the database has version {version}, and this release needs {OLDEST} at "
            "least; run `gateway database upgrade`"
        )


async def upgrade(connection: Connection) -> list[str]:
    """Run the migrations that the database lacks. Return their numbers.

    If another process is upgrading the same database, wait for its end first. Raise SchemaMismatch
    if the schema is newer than this release.
    """
    if connection.is_postgresql:
        await connection.fetch("SELECT pg_advisory_xact_lock($1)", _LOCK_ID)
        # Statements that change a table wait for its users, and further users wait for them.
        await connection.fetch(f"SET LOCAL lock_timeout = '{_LOCK_TIMEOUT}'")
    version = await read_version(connection)
    if version is not None and version > VERSIONS[-1]:
        await check(connection)
    missing = [number for number in VERSIONS if version is None or number > version]
    dialect = "postgresql" if connection.is_postgresql else "sqlite"
    for number in missing:
        for name in (f"{number}.sql", f"{number}.{dialect}.sql"):
            for statement in _read_statements(_FOLDER / name):
                await connection.fetch(statement)
    if missing:
        await write_fact(connection, "schema", missing[-1])
        await write_fact(connection, "readable_from", READABLE_FROM)
    if version is None:
        await write_fact(connection, "identity", str(uuid.uuid4()))
    return missing


def _read_statements(file: Path) -> list[str]:
    if not file.exists():
        return []
    script = _COMMENT.sub("", file.read_text(encoding="utf-8"))
    return [*filter(None, map(str.strip, script.split(";")))]
