"""Copying of the former state into the database: once in each process, and by a command.

Copying again changes nothing. Keys are copied at each start, so that what gateways of the release
before change during an upgrade is not lost: a key is never deleted, it only ends. Overrides are
copied until the first change in the database, because an override can be taken back.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from gateway.database.changes import read_changes
from gateway.database.connection import Connection
from gateway.database.database import Database
from gateway.database.migrate import read_fact, write_fact
from gateway.errors import DatabaseUnavailable
from gateway.former_state.keys import FormerKeys, read_keys
from gateway.former_state.overrides import read_overrides
from gateway.overrides import rows as override_rows
from gateway.scheduling.override import Override
from gateway.tenancy.keys.rows import insert_keys, read_changed, write_uses
from lora_store import redis_url
from lora_store.primary import Primary, describe, failure_types

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
_FACT = "moved"
"""Name of the fact that the former state was copied once."""


@dataclass(frozen=True, slots=True)
class MoveCounts:
    """Counts of what was copied, or would be copied.

    Attributes:
        keys: Number of keys that were added, or revoked.
        overrides: Number of overrides that were added.
        known: Number of keys that the database had already.
        problems: Error texts about what could not be read, and so was not copied.
    """

    keys: int = 0
    overrides: int = 0
    known: int = 0
    problems: list[str] = field(default_factory=list)


class FormerState:
    """The state of the release before, in a state folder and in Redis."""

    def __init__(self, folder: Path, url: str | None) -> None:
        """Create the object without reading anything.

        Args:
            folder: The state folder.
            url: The URL of Redis in the syntax of `lora_store.redis_url`; None without Redis.
        """
        self._folder = folder
        self._url = url
        self._is_moved = False
        self._moving = asyncio.Lock()

    async def move_once(self, database: Database) -> None:
        """Copy the state into the database, if this process has not done so yet.

        Raise DatabaseUnavailable if Redis cannot be read and no process has ever copied its state:
        the database may then lack keys.
        """
        async with self._moving:
            if self._is_moved:
                return
            try:
                moved = await self.move(database)
            except RedisNotRead as error:
                if await database.read(partial(read_fact, name=_FACT)) is None:
                    raise DatabaseUnavailable(str(error)) from error
                log.warning("%s", error)
            else:
                for problem in moved.problems:
                    log.error("not moved to the database: %s", problem)
                if moved.keys or moved.overrides:
                    log.info(
                        "moved to the database: %d keys, %d overrides",
                        *(moved.keys, moved.overrides),
                    )
            self._is_moved = True

    async def move(self, database: Database, *, dry_run: bool = False) -> MoveCounts:
        """Copy the state into the database. With `dry_run`, change nothing.

        Raises:
            RedisNotRead: Redis is configured and cannot be read.
            DatabaseUnavailable: The database cannot be used now.
        """
        keys, overrides, problems = await asyncio.to_thread(self._read)
        problems = [*keys.problems, *problems]
        if not keys.records and not overrides and not problems and not dry_run:
            await database.write(partial(write_fact, name=_FACT, value="1"))
            return MoveCounts()
        moved = MoveCounts(problems=problems)
        try:
            return await database.write(
                partial(_store, keys=keys, overrides=overrides, moved=moved, dry_run=dry_run)
            )
        except _DryRun as end:
            return end.moved

    def _read(self) -> tuple[FormerKeys, dict[str, Override], list[str]]:
        if self._url is None:
            return read_keys(self._folder, None), *read_overrides(self._folder, None)
        primary = Primary(redis_url.parse(self._url), _TIMEOUT_S)
        try:
            with primary.use() as client:
                return read_keys(self._folder, client), *read_overrides(self._folder, client)
        except failure_types() as error:
            raise RedisNotRead(
                f"state of the release before cannot be read: Redis: {describe(error)}"
            ) from error
        finally:
            primary.close()


class RedisNotRead(Exception):
    """Redis is configured and cannot be read. The text has no addresses and no passwords."""


class _DryRun(Exception):
    """Undoes the transaction of a dry run."""

    def __init__(self, moved: MoveCounts) -> None:
        super().__init__()
        self.moved = moved


async def _store(
    connection: Connection,
    keys: FormerKeys,
    overrides: dict[str, Override],
    moved: MoveCounts,
    dry_run: bool,
) -> MoveCounts:
    known = {record.id: record for record in await read_changed(connection, after=0)}
    new = [
        record
        for record in keys.records.values()
        if record.id not in known or (record.revoked and not known[record.id].revoked)
    ]
    if new:
        await insert_keys(connection, new)
        added = {record.id for record in new}
        await write_uses(connection, {key: at for key, at in keys.uses.items() if key in added})
    count = 0
    changes, _ = await read_changes(connection)
    if override_rows.CHANGES not in changes:
        count = len(overrides)
        if overrides:
            await override_rows.insert_overrides(connection, overrides)
    await write_fact(connection, _FACT, "1")
    result = MoveCounts(len(new), count, len(keys.records) - len(new), moved.problems)
    if dry_run:
        raise _DryRun(result)
    return result
