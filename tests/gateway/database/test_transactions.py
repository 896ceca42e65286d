"""Transactions of SQLite and of PostgreSQL: all or nothing, values, cancelled callers, order."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import asyncpg
import pytest

from gateway.database.changes import raise_number
from gateway.database.connection import Connection, Row, Value, run_now
from gateway.database.database import Database
from tests.gateway.database.conftest import Gate, Processes
from tests.support.adapter_store import becomes
from tests.support.upgraded_database import create_tables

NAME = "probe"  # of a change number
WRITERS = 24
COLUMNS = "id text PRIMARY KEY, number bigint, words text, data bytea, share double precision"
VALUES: tuple[tuple[Value, ...], ...] = (
    (0, "", b"", 0.0),
    (-1, "plain", b"plain", -0.5),
    (2**53 + 1, "naïve 😀 你好 \u202e", b"a\0b\xff\xfe", 1e300),
    (2**63 - 1, "'; DROP TABLE facts; -- $1 ?1", bytes(range(256)) * 20, 5e-324),
    (-(2**63), "line\nline\ttab\x7f", b"\0", 0.1),
    (None, None, None, None),
)


@pytest.fixture
async def database(database: Database) -> Database:
    await database.write(partial(_fetch, sql=f"CREATE TABLE {NAME} ({COLUMNS})"))
    return database


async def _fetch(connection: Connection, sql: str) -> Sequence[Row]:
    return await connection.fetch(sql)


async def _insert(connection: Connection, *ids: str) -> None:
    await connection.execute_many(f"INSERT INTO {NAME} (id) VALUES ($1)", [(each,) for each in ids])


async def _ids(database: Database) -> list[str]:
    return [row[0] for row in await database.read(partial(_fetch, sql=f"SELECT id FROM {NAME}"))]


async def test_other_processes_see_what_is_committed(
    database: Database, processes: Processes
) -> None:
    async def insert(connection: Connection) -> str:
        await _insert(connection, "a", "b")
        return "its result"

    other = await processes.start()
    assert await _ids(other) == []
    assert await database.write(insert) == "its result"
    assert await _ids(other) == await _ids(database) == ["a", "b"]


async def test_an_error_in_the_function_changes_nothing(database: Database) -> None:
    async def insert(connection: Connection, ids: tuple[str, ...]) -> None:
        await _insert(connection, *ids)
        raise LookupError("of the function")

    with pytest.raises(LookupError, match="of the function"):
        await database.write(partial(insert, ids=("a", "b")))
    assert await _ids(database) == []
    assert not database.problem
    await database.write(partial(_insert_each, ids=("a",)))
    assert await _ids(database) == ["a"]


async def _insert_each(connection: Connection, ids: tuple[str, ...]) -> None:
    for each in ids:
        await _insert(connection, each)


@pytest.mark.parametrize("insert", [_insert_each, lambda each, ids: _insert(each, *ids)])
async def test_a_refused_statement_undoes_the_statements_before(
    database: Database, insert: Callable[..., Coroutine[Any, Any, None]]
) -> None:
    with pytest.raises((sqlite3.IntegrityError, asyncpg.UniqueViolationError)):
        await database.write(partial(insert, ids=("a", "b", "a")))
    assert await _ids(database) == []
    assert not database.problem  # the statement is wrong, not the database
    await database.write(partial(insert, ids=("a",)))


async def test_values_come_back_as_they_were(database: Database) -> None:
    async def insert(connection: Connection, rows: Sequence[tuple[Value, ...]]) -> None:
        await connection.fetch(f"INSERT INTO {NAME} VALUES ($1, $2, $3, $4, $5)", *rows[0])
        sql = f"INSERT INTO {NAME} VALUES ($5, $1, $2, $3, $4)"  # placeholders in another order
        await connection.execute_many(sql, [(*row[1:], row[0]) for row in rows[1:]])

    rows = [(f"row {number}", *values) for number, values in enumerate(VALUES)]
    await database.write(partial(insert, rows=rows))
    sql = f"SELECT * FROM {NAME} ORDER BY id"
    found = [tuple(row) for row in await database.read(partial(_fetch, sql=sql))]
    assert found == rows
    assert [list(map(type, row)) for row in found] == [list(map(type, row)) for row in rows]


async def test_a_row_that_does_not_exist_has_no_value(database: Database) -> None:
    async def read(connection: Connection) -> object:
        return await connection.fetch_value(f"SELECT id FROM {NAME} WHERE id = $1", "a")

    assert await database.read(read) is None


async def test_a_function_of_sqlite_that_awaits_something_else_changes_nothing(
    database: Database,
) -> None:
    async def insert(connection: Connection) -> None:
        await _insert(connection, "a")
        if not connection.is_postgresql:
            await asyncio.sleep(0)

    if type(database).__name__ != "SqliteDatabase":
        await database.write(insert)  # PostgreSQL's functions run in the event loop
        return
    with pytest.raises(RuntimeError, match="awaited something else"):
        await database.write(insert)
    assert await _ids(database) == []


def test_a_coroutine_that_suspends_is_refused() -> None:
    with pytest.raises(RuntimeError, match="awaited something else"):
        run_now(asyncio.sleep(0))


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancelled_caller_does_not_cancel_the_transaction(
    database: Database, processes: Processes, gate: Gate, fails: bool
) -> None:
    other = await processes.start()

    async def insert(connection: Connection) -> None:
        await _insert(connection, "a")
        await gate.wait(connection)
        if fails:
            raise LookupError("that no caller gets")
        await _insert(connection, "b")

    caller = asyncio.create_task(database.write(insert))
    await gate.reached.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert await _ids(other) == []
    gate.open()
    await processes.end(database)  # waits for the transaction
    assert await _ids(other) == ([] if fails else ["a", "b"])


async def test_close_waits_for_transactions(
    database: Database, processes: Processes, gate: Gate
) -> None:
    other = await processes.start()

    async def insert(connection: Connection) -> str:
        await gate.wait(connection)
        await _insert(connection, "a")
        return "done"

    async def read(connection: Connection) -> str:
        await gate.wait(connection)
        return "read"

    calls = [asyncio.create_task(database.write(insert)), asyncio.create_task(database.read(read))]
    await gate.reached.wait()
    closing = asyncio.create_task(processes.end(database))
    # Another process reads meanwhile, so `close` has had its chance to end too early.
    for _ in range(20):
        assert await _ids(other) == []
    assert not closing.done()
    gate.open()
    await closing
    assert [call.result() for call in calls] == ["done", "read"]
    assert await _ids(other) == ["a"]


async def test_numbers_are_distinct_and_visible_in_their_order(
    database: Database, processes: Processes
) -> None:
    """Check that a reader of a number reads all rows of lower numbers, too."""

    async def insert(connection: Connection, writer: int) -> int:
        number = await raise_number(connection, NAME)
        values = f"{writer}", number
        await connection.fetch(f"INSERT INTO {NAME} (id, number) VALUES ($1, $2)", *values)
        return number

    sql = (
        f"SELECT (SELECT number FROM changes WHERE name = '{NAME}'), count(*), max(number)"
        f" FROM {NAME}"
    )
    seen: set[int] = set()

    async def watch(reader: Database) -> None:
        while max(seen, default=0) < WRITERS:
            [[number, count, last]] = await reader.read(partial(_fetch, sql=sql))
            assert (number or 0) == count == (last or 0)
            seen.add(count)

    writers = [database, await processes.start(), await processes.start()]
    watching = asyncio.create_task(watch(await processes.start()))
    await becomes(lambda: seen)
    writes = [writers[n % 3].write(partial(insert, writer=n)) for n in range(WRITERS)]
    numbers = await asyncio.gather(*writes)
    await watching
    assert sorted(numbers) == list(range(1, WRITERS + 1))


async def test_the_first_calls_wait_until_the_database_is_prepared(
    database: Database, processes: Processes, gate: Gate
) -> None:
    events = []

    async def prepare(connection: Connection) -> None:
        await create_tables(connection)
        await gate.wait(connection)
        events.append("prepared")

    async def read(_: Connection) -> None:
        events.append("read")

    starting = processes.make(prepare)
    calls = [asyncio.create_task(starting.read(read)) for _ in range(2)]
    await gate.reached.wait()
    calls.append(asyncio.create_task(starting.read(read)))
    for _ in range(20):  # time for the calls to run too early
        assert await _ids(database) == []
    gate.open()
    await asyncio.gather(*calls)
    assert events == ["prepared", "read", "read", "read"]
