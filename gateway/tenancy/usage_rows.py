"""Usage records as rows of the database, for SQL queries.

The usage log is the basis for billing: its line is written before a response ends. A row is written
within a second, and is missing if the process is killed before. Rows and lines have the same ids.

PostgreSQL's table has a partition for each day, so that old days are dropped at once.

See decision 094 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import date, timedelta
from functools import partial

from gateway.database.connection import Connection, Value
from gateway.database.database import Database
from gateway.errors import DatabaseUnavailable
from gateway.tenancy.usage_log import UsageRecord
from gateway.troubles import Troubles

_INTERVAL_S = 1.0
_MAX_WAITING = 20_000
"""Maximum number of records that wait for the database, about 10 MB. Further ones are lost."""
_ROWS_AT_ONCE = 1000
_DAY_S = 24 * 3600
_RETENTION_INTERVAL_S = 600.0
_DDL_LOCK_TIMEOUT = "300ms"
_MAX_DELETED = 2000
_MAX_FREED_PAGES = 4000  # of SQLite's file, 16 MB
_LOCK_ID = 0x7A17_05A6E  # of PostgreSQL's advisory lock for changes of the partitions
_INSERT = (
    "INSERT INTO usage_records (day, tenant, id, request_id, model, adapter, adapter_version,"
    " prompt_tokens, cached_tokens, completion_tokens, status, finish, started, ended)"
    " VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14) ON CONFLICT DO NOTHING"
)
_PARTITION = re.compile(r"usage_records_[0-9]{8}")
_EPOCH = date(1970, 1, 1)


class UsageRows:
    """Writer of the table `usage_records`."""

    def __init__(
        self, database: Database, days: int, on_lost: Callable[[], object] = lambda: None
    ) -> None:
        """Create the writer.

        Args:
            database: The database.
            days: Number of days, besides the present one, whose rows are stored.
            on_lost: Called for each record that cannot be written.
        """
        self._database = database
        self._days = days
        self._on_lost = on_lost
        self._waiting: deque[UsageRecord] = deque()
        self._partitions: set[int] = set()
        self._cleaned_at = float("-inf")

    def add(self, usage: UsageRecord) -> None:
        """Write a record soon. If too many wait for the database, the record is lost."""
        if len(self._waiting) >= _MAX_WAITING:
            self._on_lost()
        else:
            self._waiting.append(usage)

    async def follow(self, troubles: Troubles) -> None:
        """Write the records once a second, and delete old days, until cancelled."""
        while True:
            await asyncio.sleep(_INTERVAL_S)
            try:
                await self._flush()
                if time.monotonic() - self._cleaned_at >= _RETENTION_INTERVAL_S:
                    self._cleaned_at = time.monotonic()
                    old = await self._database.write(partial(_change_days, days=self._days))
                    while old is not None and await self._database.write(
                        partial(_delete_rows, day=old)
                    ):
                        pass  # other writes of SQLite are done in between
            except DatabaseUnavailable as error:
                text = f"usage records wait for the database: {error.why}"
                troubles.hold("usage_rows", logging.WARNING, text)
            except Exception as error:  # continue after any error
                text = f"usage records are not written to the database: {error!r}"
                troubles.hold("usage_rows", logging.ERROR, text, exc_info=True)
            else:
                troubles.clear("usage_rows")

    async def try_flush(self) -> None:
        """Write all waiting records, if the database is available."""
        with suppress(DatabaseUnavailable):
            await self._flush()

    async def _flush(self) -> None:
        while self._waiting:
            some = [self._waiting[n] for n in range(min(_ROWS_AT_ONCE, len(self._waiting)))]
            try:
                await self._database.write(partial(self._insert, records=some))
            except BaseException:
                self._partitions.clear()  # the database may be another one than before
                raise
            self._partitions.update(map(_get_day, some))
            for _ in some:
                self._waiting.popleft()

    async def _insert(self, connection: Connection, records: Sequence[UsageRecord]) -> None:
        if connection.is_postgresql:
            for day in {*map(_get_day, records)} - self._partitions:
                await _create_partition(connection, day)
        # Ignore rows that exist: the answer to an earlier attempt may have been lost.
        await connection.execute_many(_INSERT, [_to_row(each) for each in records])


def _get_day(usage: UsageRecord) -> int:
    return int(usage.ended) // _DAY_S


def _to_row(usage: UsageRecord) -> Sequence[Value]:
    return (
        _get_day(usage),
        usage.tenant or "",
        usage.id,
        # The client chooses this id. PostgreSQL's text cannot contain NUL, or lone surrogates.
        usage.request_id.encode("utf-8", "replace").decode().replace("\0", ""),
        usage.model,
        usage.adapter,
        usage.adapter_version,
        usage.prompt_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        usage.status,
        ",".join(usage.finish),
        usage.started,
        usage.ended,
    )


def _name_partition(day: int) -> str:
    return f"usage_records_{_EPOCH + timedelta(days=day):%Y%m%d}"


async def _create_partition(connection: Connection, day: int) -> None:
    """Create the partition of a day unless it exists."""
    name = _name_partition(day)
    # Not to_regclass: it may be out of date after the wait for the lock.
    exists = "SELECT relname FROM pg_class WHERE relname = $1 AND pg_table_is_visible(oid)"
    if await connection.fetch_value(exists, name) is not None:
        return
    # Other processes may create it at the same time.
    await connection.fetch("SELECT pg_advisory_xact_lock($1)", _LOCK_ID)
    if await connection.fetch_value(exists, name) is None:
        # To attach a table locks the table of all days less than `PARTITION OF` does, which would
        # wait for all queries, while all inserts wait for it.
        await connection.fetch(f"CREATE TABLE {name} (LIKE usage_records INCLUDING ALL)")
        await connection.fetch(
            f"ALTER TABLE usage_records ATTACH PARTITION {name}"
            f" FOR VALUES FROM ({day}) TO ({day + 1})"
        )


async def _delete_rows(connection: Connection, day: int) -> bool:
    """Delete some rows of a day from SQLite. Return True if some are left."""
    await connection.fetch(
        "DELETE FROM usage_records WHERE (day, tenant, id) IN"
        " (SELECT day, tenant, id FROM usage_records WHERE day = $1 LIMIT $2)",
        *(day, _MAX_DELETED),
    )
    await connection.fetch(f"PRAGMA incremental_vacuum({_MAX_FREED_PAGES})")
    left = "SELECT 1 FROM usage_records WHERE day = $1 LIMIT 1"
    return await connection.fetch_value(left, day) is not None


async def _change_days(connection: Connection, days: int) -> int | None:
    """Drop the oldest day if it is too old, and create tomorrow's partition.

    With SQLite, return the oldest day if its rows are to be deleted.

    One call drops one day at most, so that a wrong clock cannot delete all of them.
    """
    today = int(time.time()) // _DAY_S
    if not connection.is_postgresql:
        oldest: int | None = await connection.fetch_value("SELECT min(day) FROM usage_records")
        return oldest if oldest is not None and oldest < today - days else None
    # Do not wait long for reports that read the table, because inserts would wait as well.
    await connection.fetch(f"SET LOCAL lock_timeout = '{_DDL_LOCK_TIMEOUT}'")
    today = min(
        today,
        await connection.fetch_value("SELECT (extract(epoch FROM now()) / 86400)::bigint"),
    )
    await _create_partition(connection, today + 1)
    if not await connection.fetch_value("SELECT pg_try_advisory_xact_lock($1)", _LOCK_ID):
        return None
    rows = await connection.fetch(
        "SELECT relname FROM pg_class JOIN pg_inherits ON pg_class.oid = inhrelid"
        " WHERE inhparent = 'usage_records'::regclass ORDER BY relname"
    )
    # Leave partitions of other names alone: an operator may have attached them.
    ours = [name for (name,) in rows if _PARTITION.fullmatch(name)]
    if ours and ours[0] < _name_partition(today - days):
        await connection.fetch(f"DROP TABLE {ours[0]}")
    return None
