"""Usage of budgets in the database, at which Redis continues after a loss of its data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from redis import Redis

from gateway.config.tenants import Tenant
from gateway.database.connection import Connection
from gateway.database.database import Database
from gateway.database.opening import make_database
from gateway.errors import DatabaseUnavailable, InsufficientQuota
from gateway.tenancy.limits.budgets import BudgetReport, BudgetTotal
from gateway.tenancy.limits.limits import Limits
from gateway.tenancy.limits.redis import SharedLimits
from gateway.tenancy.limits.totals import BudgetTotals
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.limit_requests import PATIENT_S
from tests.support.local_stack import Stack
from tests.support.redis_server import RedisServer

ACME = Tenant(name="acme", keys=[], models=["*"], tokens_per_day=1000, tokens_per_month=1000)
KEY = "sk-the-key-of-acme"


@asynccontextmanager
async def _opened(folder: Path) -> AsyncIterator[Database]:
    database = make_database(folder, None, connections=1, timeout_s=5.0)
    await database.open()
    try:
        yield database
    finally:
        await database.close()


@asynccontextmanager
async def _process(url: str, database: Database) -> AsyncIterator[Limits]:
    """Run the limits of one process, as a service does."""
    totals = BudgetTotals(database)
    await totals.synchronize()
    async with SharedLimits(
        url, timeout_s=PATIENT_S, on_budget=totals.update, totals=totals.get_totals
    ) as shared:
        yield Limits(shared)
    await totals.synchronize()


async def _spend(limits: Limits, tokens: int) -> None:
    reservation = await limits.count(ACME, 1)
    await reservation.reserve(tokens)
    reservation.close(tokens)


def _counted(client: Redis, code: str) -> int:
    fields = client.hgetall("budgets:{acme}")
    assert isinstance(fields, dict)
    return sum([int(value) for field, value in fields.items() if field[:1] == code.encode()])


async def _until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(300):
        while not met():
            await asyncio.sleep(0.02)


async def test_a_lost_redis_continues_where_it_was(
    redis_server: RedisServer, at_redis: Redis, tmp_path: Path
) -> None:
    async with _opened(tmp_path) as database:
        async with (
            _process(redis_server.url, database) as one,
            _process(redis_server.url, database) as other,
        ):
            await _spend(one, 30)
            await _spend(other, 20)
            # A process reports what it has used within seconds, and learns of the others' use.
            await _until(lambda: _counted(at_redis, "d") == 50)
            await _spend(one, 1)
            await _until(lambda: _counted(at_redis, "d") == 51)
            at_redis.flushall()
            await _spend(one, 5)
            await _spend(other, 7)
        assert (_counted(at_redis, "d"), _counted(at_redis, "m")) == (63, 63)
        # The processes have ended, and Redis loses its data again: the database has the totals.
        at_redis.flushall()
        async with _process(redis_server.url, database) as successor:
            await _spend(successor, 2)
        assert (_counted(at_redis, "d"), _counted(at_redis, "m")) == (65, 65)
        async with _process(redis_server.url, database) as successor:
            with pytest.raises(InsufficientQuota, match="limit 1000, used 65, requested 936"):
                await _spend(successor, 936)


async def test_what_one_process_knows_too_late_changes_nothing(
    redis_server: RedisServer, at_redis: Redis, tmp_path: Path
) -> None:
    async with _opened(tmp_path) as database:
        async with _process(redis_server.url, database) as one:
            await _spend(one, 30)
        old = BudgetTotals(database)
        await old.synchronize()
        async with _process(redis_server.url, database) as one:
            await _spend(one, 30)
        # `old` still knows 30, and names this total to a Redis that has counted 60.
        async with SharedLimits(
            redis_server.url, timeout_s=PATIENT_S, totals=old.get_totals
        ) as shared:
            await _spend(Limits(shared), 1)
    assert _counted(at_redis, "d") == 61


def _report(used: int, first_day: int) -> BudgetReport:
    return BudgetReport("acme", "tokens_per_day", 1000, used, 1, 1, first_day)


async def _stored(database: Database) -> list[tuple[int, int]]:
    async def read(connection: Connection) -> list[tuple[int, int]]:
        rows = await connection.fetch("SELECT first_day, used FROM budget_totals")
        return [(first_day, used) for first_day, used in rows]

    return await database.read(read)


async def test_the_database_has_the_highest_total_of_the_last_period(tmp_path: Path) -> None:
    async with _opened(tmp_path) as database:
        one, other = BudgetTotals(database), BudgetTotals(database)
        for totals, used, day, stored in (
            (one, 50, 7, (7, 50)),
            (other, 40, 7, (7, 50)),  # a late report of another process
            (one, 3, 8, (8, 3)),  # a new day
            (other, 60, 7, (8, 3)),  # a process that reports the end of the day before
            (other, 4, 8, (8, 4)),
        ):
            totals.update(_report(used, day))
            await totals.synchronize()
            assert await _stored(database) == [stored]
        assert one.get_totals("acme") == [BudgetTotal("tokens_per_day", 8, 3)]
        assert one.get_totals("other") == ()


async def test_a_total_of_the_future_is_replaced(tmp_path: Path) -> None:
    """Redis' clock was wrong for a while."""
    today = int(time.time()) // (24 * 3600)
    async with _opened(tmp_path) as database:
        await database.write(partial(_insert_total, first_day=today + 40))
        totals = BudgetTotals(database)
        await totals.synchronize()
        assert totals.get_totals("acme") == ()
        totals.update(_report(7, today + 40))
        totals.update(_report(90, today))
        await totals.synchronize()
        assert await _stored(database) == [(today, 90)]


async def _insert_total(connection: Connection, first_day: int) -> None:
    await connection.fetch(
        "INSERT INTO budget_totals (tenant, name, first_day, used)"
        " VALUES ('acme', 'tokens_per_day', $1, 1)",
        first_day,
    )


async def test_a_redis_that_lags_behind_counts_no_token_twice(
    redis_server: RedisServer, at_redis: Redis, tmp_path: Path
) -> None:
    async with _opened(tmp_path) as database, _process(redis_server.url, database) as limits:
        await _spend(limits, 30)
        await _until(lambda: _counted(at_redis, "d") == 30)
        before = at_redis.hgetall("budgets:{acme}")
        await _spend(limits, 50)
        await _until(lambda: _counted(at_redis, "d") == 80)
        # A replica that lacks the last writes becomes the primary.
        assert isinstance(before, dict)
        at_redis.hset("budgets:{acme}", mapping=before)
        await _spend(limits, 5)
        await _until(lambda: _counted(at_redis, "d") >= 85)
    assert (_counted(at_redis, "d"), _counted(at_redis, "m")) == (85, 85)


async def test_totals_are_written_when_the_database_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "@database"
    folder.write_text("no folder")
    async with _opened(tmp_path) as database:
        totals = BudgetTotals(database)
        totals.update(_report(50, 7))
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable):
                await totals.synchronize()
        folder.unlink()
        await totals.synchronize()
        assert await _stored(database) == [(7, 50)]
        await database.write(_lose_rows)
        await totals.synchronize()  # nothing has changed, so nothing is written again
        assert await _stored(database) == []


async def _lose_rows(connection: Connection) -> None:
    await connection.fetch("DELETE FROM budget_totals")


def test_a_tenant_does_not_get_its_budget_again(
    stack: Stack, redis_server: RedisServer, at_redis: Redis, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "c.yaml", tenant("acme", KEY, tokens_per_month=60))
    settings = {"config": config, "redis_url": redis_server.url, "redis_timeout": PATIENT_S}
    statuses: list[int] = []
    for _ in range(3):  # a restart, and an emptied Redis
        with (
            GatewayProcess(tmp_path / "g", stack, **settings) as gateway,
            gateway.client(KEY) as client,
        ):
            for _ in range(3):
                answer = client.post("/v1/completions", json=body(max_tokens=20))
                statuses.append(answer.status_code)
        at_redis.flushall()
    first_refusal = statuses.index(429)
    assert first_refusal > 0
    assert set(statuses[first_refusal:]) == {429}, statuses
