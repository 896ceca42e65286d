"""Databases with a gateway's tables, as `gateway database upgrade` and gateways create them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gateway.database.connection import Connection
from gateway.database.migrate import upgrade
from gateway.database.opening import make_database
from tests.support.patience import PATIENCE_S


def upgrade_database(url: str) -> None:
    """Create the tables in PostgreSQL. Tests may call this function within an event loop."""
    _run(Path(), url)


def write_sqlite(store: Path) -> None:
    """Create the SQLite file of a gateway whose GATEWAY_STORE_DIR is `store`."""
    _run(store, None)


def _run(store: Path, url: str | None) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, _create(store, url)).result()


async def _create(store: Path, url: str | None) -> None:
    database = make_database(store, url, connections=1, timeout_s=PATIENCE_S, prepare=create_tables)
    await database.open()
    problem = database.problem
    await database.close()
    assert not problem, problem


async def create_tables(connection: Connection) -> None:
    """Create the tables, as the function `prepare` of a database."""
    await upgrade(connection)
