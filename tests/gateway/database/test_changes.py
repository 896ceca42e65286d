"""The change feed: which changes refresh which subscribers, and what a failure changes."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.database import changes as changes_module
from gateway.database.changes import ChangeFeed, Refresh, raise_number, read_changes
from gateway.database.connection import Connection
from gateway.database.database import Database
from gateway.errors import DatabaseUnavailable
from gateway.troubles import Troubles
from tests.gateway.database.conftest import Processes
from tests.support.adapter_store import becomes
from tests.support.patience import PATIENCE_S
from tests.support.postgresql_server import PostgresqlServer

KEYS, OVERRIDES = "keys", "overrides"

Calls = list[tuple[str, int, bool]]
"""Names, numbers, and whether all rows had to be loaded."""


async def _raise(database: Database, name: str) -> int:
    return await database.write(partial(raise_number, name=name))


def _note(calls: Calls, name: str) -> Refresh:
    async def refresh(number: int, is_all: bool) -> None:
        calls.append((name, number, is_all))

    return refresh


def _feed(database: Database, calls: Calls) -> ChangeFeed:
    feed = ChangeFeed(database)
    for name in (OVERRIDES, KEYS):
        feed.subscribe(name, _note(calls, name))
    return feed


async def test_the_first_poll_and_each_change_refresh(
    database: Database, processes: Processes
) -> None:
    other = await processes.start()
    assert await _raise(other, KEYS) == 1
    calls: Calls = []
    feed = _feed(database, calls)
    await feed.poll()
    assert calls == [(OVERRIDES, 0, True), (KEYS, 1, True)]
    await feed.poll()
    assert len(calls) == 2
    assert [await _raise(other, KEYS) for _ in range(3)] == [2, 3, 4]
    await feed.poll()
    assert calls[2:] == [(KEYS, 4, False)]
    await _raise(other, OVERRIDES)
    await _raise(other, "of a later release")
    await feed.poll()
    await feed.poll()
    assert calls[3:] == [(OVERRIDES, 1, False)]
    changes, _ = await database.read(read_changes)
    numbers = {name: change.number for name, change in changes.items()}
    assert numbers == {KEYS: 4, OVERRIDES: 1, "of a later release": 1}


@pytest.mark.parametrize("changes_after", [0, 1, 2])
async def test_lost_changes_are_noticed(database: Database, changes_after: int) -> None:
    """Restore a backup that lacks the last change, and change its keys before the next poll."""

    async def copy(connection: Connection) -> list[Any]:
        return [*map(tuple, await connection.fetch("SELECT name, number, token FROM changes"))]

    async def restore(connection: Connection, backup: list[Any]) -> None:
        await connection.fetch("DELETE FROM changes")
        await connection.execute_many("INSERT INTO changes VALUES ($1, $2, $3)", backup)

    for _ in range(3):
        await _raise(database, KEYS)
    backup = await database.read(copy)
    for name in (KEYS, OVERRIDES):
        await _raise(database, name)
    calls: Calls = []
    feed = _feed(database, calls)
    await feed.poll()
    await database.write(partial(restore, backup=backup))
    for _ in range(changes_after):
        await _raise(database, KEYS)
    await feed.poll()
    # After two changes, the number is higher than before. Only PostgreSQL's start time shows it.
    assert calls[2:] == [(OVERRIDES, 0, True), (KEYS, 3 + changes_after, changes_after < 2)]


async def test_another_server_may_have_lost_changes(
    server: PostgresqlServer, tmp_path: Path, no_pause: None
) -> None:
    """Check that all rows are loaded again after a failover, even if no number has changed."""
    with server.database() as url:
        processes = Processes(tmp_path, url)
        database = await processes.start()
        await _raise(database, KEYS)
        calls: Calls = []
        feed = _feed(database, calls)
        await feed.poll()
        server.restart()
        async with asyncio.timeout(PATIENCE_S):
            while len(calls) < 4:
                await feed.poll()
        assert calls[2:] == [(OVERRIDES, 0, True), (KEYS, 1, True)]
        await processes.end()


async def test_a_rolled_back_change_refreshes_nobody(database: Database) -> None:
    async def change(connection: Connection) -> None:
        await raise_number(connection, KEYS)
        raise LookupError

    calls: Calls = []
    feed = _feed(database, calls)
    await feed.poll()
    with pytest.raises(LookupError):
        await database.write(change)
    await feed.poll()
    assert calls == [(OVERRIDES, 0, True), (KEYS, 0, True)]
    assert await _raise(database, KEYS) == 1


async def test_a_change_during_a_refresh_is_not_missed(database: Database) -> None:
    numbers = []

    async def refresh(number: int, _: bool) -> None:
        numbers.append(number)
        if number == 0:
            await _raise(database, KEYS)

    feed = ChangeFeed(database)
    feed.subscribe(KEYS, refresh)
    for _ in range(3):
        await feed.poll()
    assert numbers == [0, 1]


@pytest.mark.parametrize("error", [DatabaseUnavailable("of the test"), LookupError("of the test")])
async def test_a_refresh_that_fails_is_repeated(database: Database, error: Exception) -> None:
    """Check that the others are refreshed, whichever fails: a key may have been revoked."""
    calls: Calls = []
    failing = {OVERRIDES}

    async def refresh(number: int, is_all: bool, name: str) -> None:
        if name in failing:
            raise error
        calls.append((name, number, is_all))

    feed = ChangeFeed(database)
    for name in ("first", OVERRIDES, KEYS):
        feed.subscribe(name, partial(refresh, name=name))

    async def poll() -> None:
        try:
            await feed.poll()
        except LookupError:
            assert failing

    await poll()
    assert calls == [("first", 0, True), (KEYS, 0, True)]
    await _raise(database, KEYS)
    await poll()
    assert calls[2:] == [(KEYS, 1, False)]
    failing.clear()
    await poll()
    await poll()
    assert calls[3:] == [(OVERRIDES, 0, True)]


async def test_an_unavailable_database_refreshes_nobody(tmp_path: Path) -> None:
    processes = Processes(tmp_path, None)
    (tmp_path / "@database").touch()  # not a folder
    database = processes.make()
    await database.open()
    calls: Calls = []
    feed = _feed(database, calls)
    await feed.poll()
    assert not calls
    assert database.problem
    (tmp_path / "@database").unlink()
    await feed.poll()
    assert calls == [(OVERRIDES, 0, True), (KEYS, 0, True)]
    await processes.end()


async def test_followers_report_an_error_until_it_is_over(
    database: Database, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(changes_module, "POLL_INTERVAL_S", 0.01)
    calls: Calls = []
    failing = [True]

    async def refresh(number: int, is_all: bool) -> None:
        if failing:
            raise LookupError("of the test")
        calls.append((KEYS, number, is_all))

    feed, troubles = ChangeFeed(database), Troubles()
    feed.subscribe(KEYS, refresh)
    following = asyncio.create_task(feed.follow(troubles))
    await becomes(troubles.facts)
    assert "of the test" in str(troubles.facts()["changes"]["text"])
    failing.clear()
    await becomes(lambda: not troubles.facts())
    assert calls == [(KEYS, 0, True)]
    await _raise(database, KEYS)
    await becomes(lambda: len(calls) == 2)
    following.cancel()
