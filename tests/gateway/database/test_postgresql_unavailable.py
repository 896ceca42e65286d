"""A PostgreSQL that is killed, frozen, stopped or busy: calls fail in time, and succeed again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from gateway.database import database as database_module
from gateway.database import postgresql as postgresql_module
from gateway.database.connection import Connection
from gateway.database.database import Database, Query
from gateway.database.migrate import check, read_fact, write_fact
from gateway.database.opening import make_database
from gateway.errors import DatabaseUnavailable
from tests.gateway.database.conftest import Gate, Processes
from tests.support.patience import PATIENCE_S
from tests.support.postgresql_server import PostgresqlServer
from tests.support.upgraded_database import create_tables

SHORT_S = 0.4
"""Timeout of statements and of waits for a connection, in tests in which it must expire."""
NAME = "probe"  # of a fact

read = partial(read_fact, name=NAME)


def write(value: str) -> Query[None]:
    return partial(write_fact, name=NAME, value=value)


@pytest.fixture
def url(server: PostgresqlServer) -> Iterator[str]:
    with server.database() as url:
        yield url


async def _succeeds(database: Database) -> None:
    """Wait until calls succeed again."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await database.write(write("again"))
            except DatabaseUnavailable:
                await asyncio.sleep(0.01)
            else:
                break
    assert await database.read(read) == "again"
    assert not database.problem


async def _fails(database: Database) -> str:
    """Check that reads and writes fail, and return the reason."""
    failures = database.failures
    for call in (database.read(read), database.write(write("never stored"))):
        with pytest.raises(DatabaseUnavailable) as caught:
            await asyncio.wait_for(call, PATIENCE_S)
        assert caught.value.why == database.problem != ""
    assert database.failures > failures
    return database.problem


async def test_a_killed_server_that_is_started_again(
    server: PostgresqlServer, processes: Processes
) -> None:
    """Check with the ordinary pause that a process needs no restart and loses nothing."""
    database = await processes.start()
    await database.write(write("before"))
    await asyncio.gather(*(database.read(read) for _ in range(8)))  # several connections
    server.kill()
    await _fails(database)
    server.start()
    other = processes.make(check)
    assert await other.read(read) == "before"
    await _succeeds(database)


async def test_a_server_that_is_stopped_at_the_start(
    server: PostgresqlServer, processes: Processes, no_pause: None
) -> None:
    server.stop()
    database = processes.make()
    await database.open()
    assert database.problem
    await _fails(database)
    server.start()
    await _succeeds(database)  # its tables are created now


async def test_during_the_pause_calls_fail_without_a_connection(
    server: PostgresqlServer, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "_PAUSE_S", PATIENCE_S)
    database = await processes.start()
    server.stop()
    reason = await _fails(database)
    server.start()
    # The server answers, but this object does not ask it yet.
    with pytest.raises(DatabaseUnavailable) as caught:
        await database.read(read)
    assert caught.value.why == reason
    assert not (await processes.start()).problem


async def test_the_reason_stays_known_although_a_call_succeeds_late(
    server: PostgresqlServer,
    processes: Processes,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check a call that begins before a failure and succeeds after it."""
    monkeypatch.setattr(database_module, "_PAUSE_S", PATIENCE_S)
    database = await processes.start()

    async def wait(connection: Connection) -> str | None:
        found = await read_fact(connection, "schema")
        await gate.wait(connection)
        return found

    late = asyncio.create_task(database.read(wait))
    await gate.reached.wait()
    server.execute("ALTER ROLE gateway NOLOGIN")
    try:
        with pytest.raises(DatabaseUnavailable):
            await asyncio.gather(database.read(read), database.read(read))
    finally:
        server.execute("ALTER ROLE gateway LOGIN")
    gate.open()
    assert await late
    [found] = await asyncio.gather(database.read(read), return_exceptions=True)
    assert found is None or (isinstance(found, DatabaseUnavailable) and found.why), found


@contextmanager
def _frozen(server: PostgresqlServer) -> Iterator[None]:
    """Stop all processes of the server in this context, as a hypervisor does it."""
    stopped = []
    try:
        for process in (psutil.Process(server.pid), *psutil.Process(server.pid).children()):
            process.send_signal(signal.SIGSTOP)
            stopped.append(process)
        yield
    finally:
        for process in stopped:
            process.send_signal(signal.SIGCONT)


@pytest.fixture
def no_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client wait for hardly longer than the server."""
    monkeypatch.setattr(postgresql_module, "_CLIENT_MARGIN_S", 0.1)


@pytest.fixture
async def impatient(processes: Processes, no_pause: None, no_margin: None) -> Database:
    """Return an open database with a short timeout."""
    await processes.start()
    database = processes.make(check, SHORT_S)
    assert await database.read(read) is None
    return database


async def test_calls_of_a_frozen_server_end_while_it_is_frozen(
    server: PostgresqlServer, impatient: Database
) -> None:
    with _frozen(server):
        assert await _fails(impatient) == "it does not answer in time"
    await _succeeds(impatient)


async def test_a_frozen_server_does_not_hold_up_the_end(
    server: PostgresqlServer,
    processes: Processes,
    impatient: Database,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(postgresql_module, "_CLOSE_TIMEOUT_S", SHORT_S)
    await asyncio.gather(*(impatient.read(read) for _ in range(8)))
    with _frozen(server):
        await asyncio.wait_for(processes.end(impatient), PATIENCE_S)


async def test_a_slow_statement_fails_alone(impatient: Database) -> None:
    async def sleep(connection: Connection) -> None:
        await write_fact(connection, NAME, "never stored")
        await connection.fetch("SELECT pg_sleep($1)", PATIENCE_S)

    with pytest.raises(DatabaseUnavailable):
        await impatient.write(sleep)
    assert await impatient.read(read) is None
    await _succeeds(impatient)


async def test_a_function_that_holds_its_transaction_for_long_is_ended(
    impatient: Database, gate: Gate
) -> None:
    """Check that it neither keeps its locks nor stores anything."""

    async def hold(connection: Connection) -> None:
        await write_fact(connection, NAME, "never stored")
        await gate.wait(connection)

    held = asyncio.create_task(impatient.write(hold))
    await gate.reached.wait()
    await _succeeds(impatient)  # with the same row
    gate.open()
    with pytest.raises(DatabaseUnavailable):
        await held
    assert await impatient.read(read) == "again"


async def test_calls_without_a_free_connection_end(
    processes: Processes, no_pause: None, no_margin: None, gate: Gate, url: str, tmp_path: Path
) -> None:
    await processes.start()
    options: dict[str, Any] = {"connections": 2, "timeout_s": SHORT_S, "prepare": create_tables}
    small = make_database(tmp_path, url, **options)
    await small.open()
    # Reads outside a transaction, which the server does not end.
    held = [asyncio.create_task(small.read(gate.wait)) for _ in range(2)]
    await gate.reached.wait()
    assert await _fails(small) == "it does not answer in time"
    gate.open()
    await asyncio.gather(*held)
    await _succeeds(small)
    await small.close()
