"""Change numbers, by which processes find out that another process has changed rows.

Each group of rows, such as the keys, has a number in the table `changes`. A transaction that
changes such rows raises the number, and so locks it until the transaction ends. Numbers are
therefore visible in their order.

A database may lose its last changes: after a failover to a standby, or if a backup is restored. The
next changes then get the same numbers again. To detect this, each change also sets a random token,
and PostgreSQL's server has another start time.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from gateway.database.connection import Connection
from gateway.database.database import Database
from gateway.errors import DatabaseUnavailable
from gateway.troubles import Troubles

POLL_INTERVAL_S = 0.5


class Change(NamedTuple):
    """The last change of a group of rows.

    Attributes:
        number: The change number; 0 before the first change.
        token: Random text of this change.
        server: Start time of PostgreSQL's server; empty with SQLite.
    """

    number: int
    token: str
    server: str


Refresh = Callable[[int, bool], Awaitable[None]]
"""Function that loads changed rows. Its arguments are the present change number, and True if all
rows must be loaded, because the database may have lost changes that this process has loaded."""


async def raise_number(connection: Connection, name: str) -> int:
    """Raise the change number `name`, and return it."""
    number: int = await connection.fetch_value(
        "INSERT INTO changes (name, number, token) VALUES ($1, 1, $2) ON CONFLICT (name)"
        " DO UPDATE SET number = changes.number + 1, token = excluded.token RETURNING number",
        *(name, secrets.token_hex(8)),
    )
    return number


async def read_changes(connection: Connection) -> tuple[dict[str, Change], str]:
    """Return the last change of each group by name, and the start time of PostgreSQL's server.

    A name is missing until its first change.
    """
    server = ""
    if connection.is_postgresql:
        server = await connection.fetch_value("SELECT pg_postmaster_start_time()::text")
    rows = await connection.fetch("SELECT name, number, token FROM changes")
    return {name: Change(number, token, server) for name, number, token in rows}, server


class ChangeFeed:
    """Poller of the change numbers. It calls functions after other processes' changes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._refresh: dict[str, Refresh] = {}
        self._seen: dict[str, Change] = {}

    def subscribe(self, name: str, refresh: Refresh) -> None:
        """Call `refresh` in the first poll, and after each change of the number `name`.

        If `refresh` raises an error, it is called again in the next poll.
        """
        self._refresh[name] = refresh

    async def poll(self) -> None:
        """Poll once. Do nothing if the database is unavailable, which reports that itself.

        Raise the first other error, after all functions were called.
        """
        try:
            changes, server = await self._database.read(read_changes)
        except DatabaseUnavailable:
            return
        unexpected: Exception | None = None
        for name, refresh in self._refresh.items():
            now, seen = changes.get(name, Change(0, "", server)), self._seen.get(name)
            if now == seen:
                continue
            lost = seen is None or seen.server != server or seen.number >= now.number
            try:
                with suppress(DatabaseUnavailable):
                    await refresh(now.number, lost)
                    self._seen[name] = now
            except Exception as error:  # the other functions must be called, too
                unexpected = unexpected or error
        if unexpected is not None:
            raise unexpected

    async def follow(self, troubles: Troubles) -> None:
        """Poll twice a second until cancelled."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                await self.poll()
            except Exception as error:  # continue to poll after any error
                text = f"changes of keys and overrides are not followed: {error!r}"
                troubles.hold("changes", logging.ERROR, text, exc_info=True)
            else:
                troubles.clear("changes")
