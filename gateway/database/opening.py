"""Function `make_database`, which selects the database that the settings name."""

from __future__ import annotations

from pathlib import Path

from gateway.database.connection import Connection
from gateway.database.database import Database, Query
from gateway.database.migrate import check, upgrade
from gateway.database.sqlite import FILE, SqliteDatabase

_FOLDER = "@database"
"""Folder of the SQLite file in the state folder.

It begins with "@". The quoted names of models' folders never contain "@", so no model can have the
same folder.
"""


def make_database(
    store: Path,
    url: str | None,
    *,
    connections: int,
    timeout_s: float,
    prepare: Query[None] | None = None,
) -> Database:
    """Return PostgreSQL's database if there is a URL, else SQLite's.

    The schema of SQLite is upgraded at the start, the one of PostgreSQL by a command: gateways of
    several releases may use it.

    Args:
        store: The state folder.
        url: The URL of PostgreSQL; None for SQLite.
        connections: Maximum number of PostgreSQL's connections of this process.
        timeout_s: Maximum duration of PostgreSQL's statements, in seconds.
        prepare: See `Database`; None to check PostgreSQL's schema, or to upgrade SQLite's.
    """
    if url is None:
        return SqliteDatabase(store / _FOLDER, prepare or _upgrade)
    # asyncpg is imported only where it is used: it takes 50 ms and 2 MB.
    from gateway.database.postgresql import PostgresqlDatabase  # noqa: PLC0415

    return PostgresqlDatabase(url, prepare or check, connections=connections, timeout_s=timeout_s)


def sqlite_file(store: Path) -> Path:
    """Return the path of the SQLite file in a state folder."""
    return store / _FOLDER / FILE


async def _upgrade(connection: Connection) -> None:
    await upgrade(connection)
