"""Databases for the tests of this folder: SQLite, and each release of PostgreSQL."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.database import database as database_module
from gateway.database.connection import Connection
from gateway.database.database import Database, Query
from gateway.database.opening import make_database
from tests.support.patience import PATIENCE_S
from tests.support.postgresql_server import (
    VERSIONS,
    PostgresqlServer,
    available,
    running_postgresql,
    why_missing,
)
from tests.support.upgraded_database import create_tables

SQLITE = "sqlite"

StartServer = Callable[[str], PostgresqlServer]


class Gate:
    """A barrier at which functions of transactions wait, in the event loop or in a thread."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        """Set as soon as a function waits."""
        self._loop = asyncio.get_running_loop()
        self._for_loop = asyncio.Event()
        self._for_threads = threading.Event()

    async def wait(self, connection: Connection) -> None:
        self._loop.call_soon_threadsafe(self.reached.set)
        if connection.is_postgresql:
            await self._for_loop.wait()
        else:
            assert self._for_threads.wait(PATIENCE_S)

    def open(self) -> None:
        self._for_loop.set()
        self._for_threads.set()


@pytest.fixture(scope="session")
def start_server(request: pytest.FixtureRequest) -> Iterator[StartServer]:
    """Yield a function that returns a server of a release, which tests must leave running."""
    servers: dict[str, PostgresqlServer] = {}
    with ExitStack() as started:

        def start(version: str) -> PostgresqlServer:
            binaries = dict(available())
            if version not in binaries:
                pytest.skip(why_missing(version))
            if version == available()[0][0]:
                newest: PostgresqlServer = request.getfixturevalue("postgresql")
                return newest
            if version not in servers:
                servers[version] = started.enter_context(running_postgresql(binaries[version]))
            return servers[version]

        yield start


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    """Yield a server that tests may stop and kill. It must be running at the end of each test."""
    if not available():
        pytest.skip("PostgreSQL is not installed: make setup")
    with running_postgresql(durable=True) as server:
        yield server


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls try to connect at once after a failed connection."""
    monkeypatch.setattr(database_module, "_PAUSE_S", 0.0)


@pytest.fixture(params=[SQLITE, *VERSIONS])
def url(request: pytest.FixtureRequest, start_server: StartServer) -> Iterator[str | None]:
    """Yield the URL of a new empty database; None for SQLite."""
    if request.param == SQLITE:
        yield None
        return
    with start_server(request.param).database() as url:
        yield url


class Processes:
    """Objects for one database, as several processes have them."""

    def __init__(self, folder: Path, url: str | None) -> None:
        self._folder = folder
        self._url = url
        self._started: list[Database] = []

    def make(
        self, prepare: Query[None] | None = create_tables, timeout_s: float = PATIENCE_S
    ) -> Database:
        """Return an object that has not connected yet."""
        options: dict[str, Any] = {"connections": 4, "timeout_s": timeout_s}
        self._started.append(make_database(self._folder, self._url, prepare=prepare, **options))
        return self._started[-1]

    async def start(self, prepare: Query[None] | None = create_tables) -> Database:
        """Return an object that has connected."""
        database = self.make(prepare)
        await database.open()
        assert not database.problem
        return database

    async def end(self, *databases: Database) -> None:
        """Close these objects; without any, close those that are still open."""
        for database in databases or tuple(self._started):
            self._started.remove(database)
            await database.close()


@pytest.fixture
async def processes(url: str | None, tmp_path: Path) -> AsyncIterator[Processes]:
    processes = Processes(tmp_path, url)
    yield processes
    await processes.end()


@pytest.fixture
async def gate(processes: Processes) -> AsyncIterator[Gate]:
    gate = Gate()
    yield gate
    gate.open()  # a test has failed, so `processes` would wait for ever


@pytest.fixture
async def database(processes: Processes) -> Database:
    """Return an open database with the tables of this release."""
    return await processes.start()
