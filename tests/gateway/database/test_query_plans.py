"""Plans of the statements on large tables: none reads a complete table to find a few rows."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.database.changes import raise_number, read_changes
from gateway.database.connection import Connection, Row, Value
from gateway.database.database import Database
from gateway.database.opening import make_database
from gateway.observability.audit import Entry, _insert, read_entries
from gateway.overrides.rows import MAX_OVERRIDES, insert_overrides, read_overrides, write_override
from gateway.scheduling.override import Override
from gateway.tenancy.keys.record import KeyRecord, make_record
from gateway.tenancy.keys.rows import (
    CHANGES,
    insert_keys,
    read_changed,
    revoke_keys,
    write_uses,
)
from tests.support.patience import PATIENCE_S
from tests.support.upgraded_database import create_tables

ROWS = 20_000
NOW = 1_800_000_000
ENTRIES_EVERY_S = 7200
MOST_ROWS = 200
"""Maximum number of rows that a part of a plan may read: a page of the audit log is 100."""
LARGE = {"api_keys", "audit_log"}
SMALL = {"facts", "changes", "replica_overrides"}
"""Tables of at most some rows by name, or of `MAX_OVERRIDES`. A scan is the best plan there."""
ZEROS = "0" * 64
Statement = tuple[str, Sequence[Value]]
_REMOVED = ("Rows Removed by Filter", "Rows Removed by Index Recheck")
# The same rows in both databases: `n` has the numbers from 1 to ROWS. One key in a hundred has been
# used, one in ten is revoked, and most entries of the audit log
# are older than what is retained.
_FILL = f"""
WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < {ROWS})
INSERT INTO api_keys
SELECT 'key_' || n, 'sha256:' || substr('{ZEROS}' || n, length('' || n) + 1), 'tenant-' || n % 50,
    '', {NOW} + n, 'sha256:00000000', NULL,
    CASE WHEN n % 10 = 0 THEN {NOW} END, CASE WHEN n % 100 = 1 THEN {NOW} + n END, n
FROM n;
WITH RECURSIVE n(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < {ROWS})
INSERT INTO audit_log (id, at, admin, action, target, outcome, before, after)
SELECT 'entry' || n, {NOW} + n * {ENTRIES_EVERY_S}, 'sha256:00000000', 'keys.create', 'key_' || n,
    'done', '', ''
FROM n;
INSERT INTO changes VALUES ('{CHANGES}', {ROWS}, '');
"""


class RecordingConnection(Connection):
    """A connection that notes the statements."""

    def __init__(self, connection: Connection, statements: list[Statement]) -> None:
        self.is_postgresql = connection.is_postgresql
        self._connection = connection
        self._statements = statements

    async def fetch(self, sql: str, *values: Value) -> Sequence[Row]:
        self._statements.append((sql, values))
        return await self._connection.fetch(sql, *values)

    async def execute_many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        self._statements.append((sql, rows[0]))
        await self._connection.execute_many(sql, rows)


@pytest.fixture(params=["sqlite", "postgresql"])
async def filled(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database]:
    """Yield a database with `ROWS` keys and as many entries of the audit log."""
    is_sqlite = request.param == "sqlite"
    url = None if is_sqlite else request.getfixturevalue("postgresql_url")
    options: dict[str, Any] = {"connections": 2, "timeout_s": PATIENCE_S}
    database = make_database(tmp_path, url, prepare=create_tables, **options)
    async with AsyncExitStack() as at_end:
        at_end.push_async_callback(database.close)
        await database.write(_fill)
        yield database


async def _fill(connection: Connection) -> None:
    for statement in filter(None, map(str.strip, _FILL.split(";"))):
        # Empty bytes are written differently.
        sql = statement.replace("'', ''\nFROM", "''::bytea, ''::bytea\nFROM")
        await connection.fetch(sql if connection.is_postgresql else statement)
    overrides = {f"host-{number}:8001": Override(weight=2) for number in range(MAX_OVERRIDES - 1)}
    await insert_overrides(connection, overrides)
    if connection.is_postgresql:  # autovacuum does it in production; SQLite has no statistics
        await connection.fetch("ANALYZE")


def _record() -> KeyRecord:
    return make_record("tenant-1", "", None, "sha256:00000000")[0]


async def _run_all(connection: Connection) -> None:
    """Call the functions that read or change rows.

    `read_uses` and the first `read_changed` of a process are left out: they read all keys.
    """
    assert len(await read_changed(connection, ROWS - 10)) == 10
    await insert_keys(connection, [_record(), _record()])
    await revoke_keys(connection, {"key_1": NOW, "key_2": NOW})
    await write_uses(connection, {"key_3": NOW, "key_4": NOW})
    await read_overrides(connection)
    await write_override(connection, "host-1:8001", Override(weight=3))
    await write_override(connection, "host-1:8001", None)
    await raise_number(connection, CHANGES)
    await read_changes(connection)
    at = NOW + ROWS * ENTRIES_EVERY_S
    await _insert(connection, Entry("new", at, "admin", "keys.create", "key_1", "done", b"", b""))
    newest = await read_entries(connection, before=None, limit=100)
    assert newest is not None
    assert newest[0].id == "new"
    older = await read_entries(connection, before=newest[-1].id, limit=100)
    assert older is not None
    assert older[0].at == newest[-1].at - ENTRIES_EVERY_S


async def _collect(database: Database) -> list[Statement]:
    """Return the statements of all functions, and undo their changes."""
    statements: list[Statement] = []

    async def run(connection: Connection) -> None:
        await _run_all(RecordingConnection(connection, statements))
        raise _Undo

    with pytest.raises(_Undo):
        await database.write(run)
    return statements


class _Undo(Exception):
    pass


async def _explain(connection: Connection, statements: list[Statement]) -> list[str]:
    """Execute the statements, and return a line about each one that reads too much."""
    found = []
    for sql, values in statements:
        if connection.is_postgresql:
            text = await connection.fetch_value(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", *values)
            lines = [*_costly_nodes(json.loads(text)[0]["Plan"])]
        else:
            rows = await connection.fetch(f"EXPLAIN QUERY PLAN {sql}", *values)
            lines = [*filter(_is_costly, (row[-1] for row in rows))]
            await connection.fetch(sql, *values)
        found += [f"{line}: {sql}" for line in lines]
    return found


def _costly_nodes(plan: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each node of PostgreSQL's plan that reads a large part of a large table."""
    rows = plan["Actual Rows"] + sum(plan.get(name, 0) for name in _REMOVED)
    table = plan.get("Relation Name", "")
    if table not in SMALL and ("Seq Scan" in plan["Node Type"] or rows > MOST_ROWS):
        yield f"{plan['Node Type']} of {rows} rows of {table}"
    for each in plan.get("Plans", ()):
        yield from _costly_nodes(each)


def _is_costly(detail: str) -> bool:
    """Return True if SQLite's plan reads a large table or index, or sorts rows of one."""
    scanned = re.match(r"SCAN (\w+)", detail)
    return "TEMP B-TREE" in detail or (scanned is not None and scanned[1] not in SMALL)


async def test_no_statement_reads_a_large_table(filled: Database) -> None:
    statements = await _collect(filled)
    changed = {word for sql, _ in statements for word in sql.split() if word in LARGE}
    assert changed == LARGE
    assert await filled.write(partial(_explain, statements=statements)) == []


async def test_statements_that_do_are_found(filled: Database) -> None:
    for sql in (
        "SELECT id FROM api_keys WHERE tenant = $1",
        "SELECT id FROM audit_log ORDER BY admin, target, outcome = $1 LIMIT 1",
        "UPDATE api_keys SET note = '' WHERE hash = $1",
        "DELETE FROM audit_log WHERE target = $1",
    ):
        statements: list[Statement] = [(sql, ("tenant-1",))]
        assert await filled.write(partial(_explain, statements=statements)) != [], sql
