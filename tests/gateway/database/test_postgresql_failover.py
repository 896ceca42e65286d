"""Failover of PostgreSQL: the connections of the old server are replaced, and no slot is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.database.connection import Connection
from gateway.database.database import Database
from gateway.database.migrate import check, read_fact, write_fact
from gateway.database.opening import make_database
from gateway.errors import DatabaseUnavailable
from ops.local_stack.ports import LOCALHOST, PortClaims
from tests.support.patience import PATIENCE_S
from tests.support.postgresql_server import PostgresqlServer
from tests.support.upgraded_database import upgrade_database

CONNECTIONS = 2
NAME = "probe"  # of a fact

read = partial(read_fact, name=NAME)
write = partial(write_fact, name=NAME, value="written")

pytestmark = pytest.mark.usefixtures("no_pause")


@pytest.fixture
def url(server: PostgresqlServer) -> Iterator[str]:
    with server.database() as url:
        upgrade_database(url)
        yield url


def _make(url: str) -> Database:
    options: dict[str, Any] = {"connections": CONNECTIONS, "timeout_s": PATIENCE_S}
    return make_database(Path(), url, prepare=check, **options)


@pytest.fixture
async def database(url: str) -> AsyncIterator[Database]:
    """Yield a database all of whose connections are open."""
    database = _make(url)
    await _open_connections(database)
    yield database
    await asyncio.wait_for(database.close(), PATIENCE_S)


async def _open_connections(database: Database) -> None:
    await asyncio.gather(*(database.read(read) for _ in range(2 * CONNECTIONS)))


async def _succeeds(database: Database) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await database.write(write)
            except DatabaseUnavailable:
                await asyncio.sleep(0.01)


@contextmanager
def _read_only(server: PostgresqlServer, url: str) -> Iterator[None]:
    """Make new sessions of a database read-only in this context, as those of a standby are."""
    name, setting = url.rpartition("/")[2], "default_transaction_read_only"
    server.execute(f"ALTER DATABASE {name} SET {setting} = on")
    server.execute(
        f"SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = '{name}'"
    )
    try:
        yield
    finally:
        server.execute(f"ALTER DATABASE {name} RESET {setting}")


async def test_sessions_of_a_standby_are_replaced(
    server: PostgresqlServer, url: str, database: Database
) -> None:
    """Check that a session that stays open is not used again after it has refused a write."""

    async def refusal() -> str:
        with pytest.raises(DatabaseUnavailable) as caught:
            await database.write(write)
        return caught.value.why

    with _read_only(server, url):
        async with asyncio.timeout(PATIENCE_S):
            while "25006" not in await refusal():  # the first ones: the sessions have ended
                pass
        assert await database.read(read) is None  # a standby answers reads
        await asyncio.gather(*(database.read(read) for _ in range(2 * CONNECTIONS)))
        assert "25006" in await refusal()
    # All sessions that are open now were opened read-only.
    await _succeeds(database)
    for _ in range(2 * CONNECTIONS):
        await database.write(write)


async def test_a_server_without_the_wanted_attributes_is_unavailable(
    server: PostgresqlServer, url: str
) -> None:
    database = _make(f"{url}?target_session_attrs=read-write")
    with _read_only(server, url):
        await database.open()
        for _ in range(CONNECTIONS + 1):
            with pytest.raises(DatabaseUnavailable) as caught:
                await database.read(read)
            assert caught.value.why == database.problem != ""
    await _succeeds(database)
    await database.close()


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_host_that_is_down_is_left_out(url: str, is_first: bool) -> None:
    with PortClaims() as claims:
        login, host = url.split("@")
        host, name = host.split("/")
        down = f"{LOCALHOST}:{claims.take_free()}"
        hosts = f"{down},{host}" if is_first else f"{host},{down}"
        database = _make(f"{login}@{hosts}/{name}")
        await database.write(write)
        assert await database.read(read) == "written"
        await database.close()


@pytest.mark.parametrize("turns", range(6))
async def test_a_stop_costs_a_call_and_no_connection(
    server: PostgresqlServer, database: Database, turns: int
) -> None:
    """Call after some turns of the event loop, so before or after it reads of the end."""
    server.stop()
    try:
        for _ in range(turns):
            await asyncio.sleep(0)
        with pytest.raises(DatabaseUnavailable):
            await database.read(read)
    finally:
        server.start()
    await _succeeds(database)
    # All connections are in the pool again: these calls are at the database at the same time.
    met = asyncio.Barrier(CONNECTIONS)

    async def meet(_: Connection) -> None:
        await met.wait()

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(database.read(meet) for _ in range(CONNECTIONS)))


async def test_ended_sessions_cost_at_most_one_call_each(
    server: PostgresqlServer, url: str, database: Database
) -> None:
    name = url.rpartition("/")[2]
    server.execute(
        f"SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE datname = '{name}'"
    )
    failed = 0
    for _ in range(2 * CONNECTIONS):
        try:
            await database.write(write)
        except DatabaseUnavailable:
            failed += 1
    assert failed <= CONNECTIONS
    assert await database.read(read) == "written"
