"""Usage records as rows of the database, over SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from gateway.database.connection import Connection, Row
from gateway.database.database import Database
from gateway.database.migrate import upgrade
from gateway.database.opening import make_database
from gateway.tenancy import usage_rows
from gateway.tenancy.usage_log import UsageRecord
from gateway.tenancy.usage_rows import UsageRows
from gateway.troubles import Troubles
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.postgresql_server import PostgresqlServer

DAY_S = 24 * 3600
TODAY = int(time.time()) // DAY_S
KEY = "sk-the-key-of-acme"
USAGE = UsageRecord(
    id="u1",
    request_id="r\x001",
    tenant="acme",
    model="demo",
    adapter=None,
    adapter_version=None,
    prompt_tokens=3,
    cached_tokens=0,
    completion_tokens=5,
    status=200,
    finish=("stop", "length"),
    started=TODAY * DAY_S + 0.25,
    ended=TODAY * DAY_S + 1.5,
)


@pytest.fixture(params=["sqlite", "postgresql"])
async def database(request: Any, tmp_path: Path) -> AsyncIterator[Database]:
    url = request.getfixturevalue("postgresql_url") if request.param == "postgresql" else None

    async def prepare(connection: Connection) -> None:
        await upgrade(connection)

    database = make_database(tmp_path, url, connections=4, timeout_s=30.0, prepare=prepare)
    await database.open()
    yield database
    await database.close()


async def _rows(database: Database, columns: str = "*") -> Sequence[Row]:
    async def read(connection: Connection) -> Sequence[Row]:
        sql = f"SELECT {columns} FROM usage_records ORDER BY day, id"
        return [tuple(row) for row in await connection.fetch(sql)]

    return await database.read(read)


async def test_a_row_has_what_the_line_has(database: Database) -> None:
    rows = UsageRows(database, 30)
    rows.add(USAGE)
    rows.add(replace(USAGE, id="u2", tenant=None, adapter="a", adapter_version="a@1", finish=()))
    await rows.try_flush()
    await rows.try_flush()
    times = USAGE.started, USAGE.ended
    assert await _rows(database) == [
        (TODAY, "acme", "u1", "r1", "demo", None, None, 3, 0, 5, 200, "stop,length", *times),
        (TODAY, "", "u2", "r1", "demo", "a", "a@1", 3, 0, 5, 200, "", *times),
    ]


async def test_a_row_that_is_written_again_is_there_once(database: Database) -> None:
    for rows in (UsageRows(database, 30), UsageRows(database, 30)):
        rows.add(USAGE)
        await rows.try_flush()
    assert len(await _rows(database)) == 1


async def test_processes_begin_a_day_at_the_same_time(database: Database) -> None:
    writers = [UsageRows(database, 30) for _ in range(8)]
    for number, rows in enumerate(writers):
        rows.add(replace(USAGE, id=str(number)))
        rows.add(replace(USAGE, id=str(number), ended=USAGE.ended + DAY_S))
    await asyncio.gather(*[rows.try_flush() for rows in writers])
    assert database.failures == 0
    assert len(await _rows(database)) == 16


async def test_old_days_are_deleted(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_rows, "_MAX_DELETED", 2)
    monkeypatch.setattr(usage_rows, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(usage_rows, "_RETENTION_INTERVAL_S", 0.0)
    rows = UsageRows(database, 30)
    for age in (0, 29, 30, 31, 32, 400):
        for number in range(3):
            ended = USAGE.ended - age * DAY_S
            rows.add(replace(USAGE, id=f"{age}-{number}", ended=ended))
    await rows.try_flush()
    assert len(await _rows(database)) == 18
    work = asyncio.create_task(rows.follow(Troubles()))
    async with asyncio.timeout(300):
        while len(found := await _rows(database, "day")) > 9:
            await asyncio.sleep(0.02)
    work.cancel()
    assert {day for (day,) in found} == {TODAY, TODAY - 29, TODAY - 30}


async def test_a_wrong_clock_deletes_one_day_at_a_time(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = UsageRows(database, 7)
    for age in range(5):
        rows.add(replace(USAGE, id=str(age), ended=USAGE.ended - age * DAY_S))
    await rows.try_flush()
    monkeypatch.setattr(usage_rows, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(usage_rows.time, "time", lambda: USAGE.ended + 1000 * DAY_S)
    work = asyncio.create_task(rows.follow(Troubles()))
    is_postgresql = await database.read(_is_postgresql)
    # PostgreSQL's own clock is right, so no day is old.
    wanted = 5 if is_postgresql else 4
    async with asyncio.timeout(300):
        while rows._cleaned_at == float("-inf") or len(await _rows(database)) != wanted:
            await asyncio.sleep(0.02)
    work.cancel()
    assert len(await _rows(database)) == wanted


async def _is_postgresql(connection: Connection) -> bool:
    return connection.is_postgresql


async def test_partitions_that_are_gone_are_created_again(
    postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    database = make_database(
        Path(), postgresql_url, connections=1, timeout_s=30.0, prepare=_prepare
    )
    await database.open()
    rows = UsageRows(database, 30)
    rows.add(USAGE)
    await rows.try_flush()
    name = postgresql_url.rpartition("/")[2]
    [partition] = postgresql.execute(
        "SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = 'usage_records'::regclass",
        name,
    ).splitlines()
    postgresql.execute(f"DROP TABLE {partition}", name)
    rows.add(replace(USAGE, id="u2"))
    with pytest.raises(asyncpg.CheckViolationError):
        await rows.try_flush()
    await rows.try_flush()
    assert await _rows(database, "id") == [("u2",)]
    await database.close()


async def test_a_report_that_reads_all_days_delays_no_rows(
    postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    database = make_database(
        Path(), postgresql_url, connections=2, timeout_s=30.0, prepare=_prepare
    )
    await database.open()
    rows = UsageRows(database, 30)
    rows.add(USAGE)
    await rows.try_flush()
    report = await asyncpg.connect(postgresql_url)
    async with report.transaction():
        await report.fetch("SELECT * FROM usage_records")
        rows.add(replace(USAGE, id="u2", ended=USAGE.ended + DAY_S))  # a new day begins
        await rows.try_flush()
        assert len(await _rows(database)) == 2
    await report.close()
    await database.close()


async def test_what_waits_for_too_long_is_counted_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_rows, "_MAX_WAITING", 2)
    lost: list[None] = []
    folder = tmp_path / "@database"
    folder.write_text("no folder")
    database = make_database(tmp_path, None, connections=1, timeout_s=5.0)
    await database.open()
    rows = UsageRows(database, 30, lambda: lost.append(None))
    for number in range(3):
        rows.add(replace(USAGE, id=str(number)))
    await rows.try_flush()
    assert len(lost) == 1
    folder.unlink()
    await rows.try_flush()
    assert await _rows(database, "id") == [("0",), ("1",)]
    await database.close()


def test_a_gateway_writes_rows_beside_lines(
    stack: Stack, tmp_path: Path, postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    _upgrade(postgresql_url)
    settings = {
        "config": write_config(tmp_path / "c.yaml", tenant("acme", KEY)),
        "usage_log": tmp_path / "usage.jsonl",
        "usage_rows_days": 1,
        "database_url": postgresql_url,
    }
    with (
        GatewayProcess(tmp_path / "g", stack, **settings) as gateway,
        gateway.client(KEY) as client,
    ):
        for _ in range(3):
            assert client.post("/v1/completions", json=body()).status_code == 200
    lines = [json.loads(line) for line in (tmp_path / "usage.jsonl").read_text().splitlines()]
    name = postgresql_url.rpartition("/")[2]
    found = postgresql.execute(
        "SELECT id, tenant, prompt_tokens, completion_tokens FROM usage_records ORDER BY ended",
        name,
    )
    wanted = ["id", "tenant", "prompt_tokens", "completion_tokens"]
    assert found.splitlines() == ["|".join(str(line[key]) for key in wanted) for line in lines]


def _upgrade(url: str) -> None:
    async def run() -> None:
        database = make_database(Path(), url, connections=1, timeout_s=30.0, prepare=_prepare)
        await database.open()
        await database.close()

    asyncio.run(run())


async def _prepare(connection: Connection) -> None:
    await upgrade(connection)
