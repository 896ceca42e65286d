"""The schema: upgraded once by many processes at once, and refused if it is not right."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from gateway.database import migrate
from gateway.database.connection import Connection
from gateway.database.database import Database, Query, SchemaMismatch, read_identity
from gateway.database.migrate import VERSIONS, check, read_version, upgrade, write_fact
from gateway.errors import DatabaseUnavailable
from tests.gateway.database.conftest import Processes
from tests.support.patience import PATIENCE_S

T = TypeVar("T")
PROCESSES = 8
NEWER = "9999"
FACTS = {"schema", "readable_from", "identity"}
TABLES = {"facts", "changes", "api_keys", "replica_overrides", "audit_log"}


async def _write_newer(connection: Connection, readable_from: str = NEWER) -> None:
    await write_fact(connection, "schema", NEWER)
    await write_fact(connection, "readable_from", readable_from)


async def _do_nothing(_: Connection) -> None:
    pass


class _Undo(Exception):
    pass


async def _inspect(processes: Processes, query: Query[T]) -> T:
    """Return the result of `query` in a database that may have no tables."""
    found = []

    async def prepare(connection: Connection) -> None:
        found.append(await query(connection))
        raise _Undo

    with pytest.raises(_Undo):
        await processes.make(prepare).open()
    return found[0]


async def _upgrade(processes: Processes) -> list[str]:
    """Start a process that upgrades the database. Return the migrations that it has run."""
    done: list[str] = []

    async def prepare(connection: Connection) -> None:
        done[:] = await upgrade(connection)

    await processes.start(prepare)
    return done


async def _tables(connection: Connection) -> set[str]:
    sql = "SELECT name FROM sqlite_master WHERE type = 'table'"
    if connection.is_postgresql:
        sql = "SELECT relname::text FROM pg_class WHERE relnamespace = 'public'::regnamespace"
        sql += " AND relkind = 'r'"
    return {name for (name,) in await connection.fetch(sql)}


async def _facts(connection: Connection) -> dict[str, str]:
    rows = await connection.fetch("SELECT name, value FROM facts ORDER BY name")
    return dict(map(tuple, rows))


async def test_an_upgrade_creates_the_tables_once(processes: Processes) -> None:
    assert await _inspect(processes, read_version) is None
    assert await _upgrade(processes) == VERSIONS
    assert await _inspect(processes, _tables) >= TABLES
    facts = await _inspect(processes, _facts)
    assert facts.keys() == FACTS
    assert facts["schema"] == VERSIONS[-1]
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", facts["identity"])
    assert await _upgrade(processes) == []
    assert await _inspect(processes, _facts) == facts
    await _inspect(processes, check)


async def test_two_databases_have_two_identities(tmp_path: Path) -> None:
    found = set()
    for name in ("one", "two"):
        processes = Processes(tmp_path / name, None)
        found.add(await (await processes.start()).read(read_identity))
        await processes.end()
    assert len(found) == 2


async def test_only_postgresql_must_be_upgraded_by_a_command(
    processes: Processes, url: str | None
) -> None:
    database = processes.make(None)  # as a gateway does it
    if url is None:
        await database.open()
        assert await database.read(read_version) == VERSIONS[-1]
        return
    with pytest.raises(SchemaMismatch, match=r"is empty; run `gateway database upgrade`$"):
        await database.open()
    await _upgrade(processes)
    assert await (await processes.start(None)).read(read_version) == VERSIONS[-1]


async def test_a_newer_schema_is_refused_and_left_as_it_is(
    processes: Processes, database: Database
) -> None:
    await database.write(_write_newer)
    unchecked = await processes.start(_do_nothing)
    before = await unchecked.read(_facts)
    with pytest.raises(DatabaseUnavailable) as caught:
        await database.write(upgrade)
    assert NEWER in caught.value.why
    starting = processes.make(None)
    with pytest.raises(SchemaMismatch, match=rf"version {NEWER}.* run a newer release"):
        await starting.open()
    assert await unchecked.read(_facts) == before


async def test_a_newer_schema_that_this_release_can_use(
    processes: Processes, database: Database
) -> None:
    """Check what a gateway does whose fleet's database was upgraded before it."""
    await database.write(partial(_write_newer, readable_from=VERSIONS[-1]))
    before = await database.read(_facts)
    starting = await processes.start(None)
    assert await starting.write(upgrade) == []
    assert await starting.read(_facts) == before


async def test_an_older_schema_names_the_command(
    processes: Processes, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "OLDEST", "0002")
    with pytest.raises(SchemaMismatch, match="run `gateway database upgrade`"):
        await processes.make(check).open()


async def test_a_schema_that_becomes_right_needs_no_restart(
    processes: Processes, database: Database
) -> None:
    """Check what happens if the schema is found wrong only after the start."""
    await database.write(_write_newer)
    late = processes.make(None)
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable, match="try again") as caught:
            await late.read(_facts)
        assert caught.value.why == late.problem
        assert NEWER in late.problem
    await database.write(partial(write_fact, name="schema", value=VERSIONS[-1]))
    assert (await late.read(_facts))["schema"] == VERSIONS[-1]
    assert not late.problem


async def test_concurrent_upgrades_run_each_migration_once(processes: Processes) -> None:
    done = await asyncio.gather(*(_upgrade(processes) for _ in range(PROCESSES)))
    assert sorted(done) == [[]] * (PROCESSES - 1) + [VERSIONS]
    assert (await _inspect(processes, _facts)).keys() == FACTS


_START = """
import asyncio, sys
from functools import partial
from pathlib import Path
from gateway.database.migrate import read_fact
from gateway.database.opening import make_database

async def main():
    database = make_database(Path(sys.argv[1]), None, connections=1, timeout_s=60)
    print("ready", flush=True)
    sys.stdin.readline()
    await database.open()
    print(database.problem or await database.read(partial(read_fact, name="identity")), flush=True)
    await database.close()

asyncio.run(main())
"""


def test_processes_that_start_with_one_empty_folder(tmp_path: Path) -> None:
    """Start the workers of a gateway with SQLite, several times."""
    pipe = subprocess.PIPE
    for attempt in range(3):
        command = [sys.executable, "-c", _START, str(tmp_path / str(attempt))]
        started = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in started:
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        found = [process.communicate(timeout=PATIENCE_S)[0].strip() for process in started]
        assert [process.returncode for process in started] == [0] * 4
        assert len(set(found)) == 1, found
        assert re.fullmatch(r"[0-9a-f-]{36}", found[0])


@pytest.fixture
def migrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the folder of migrations, for a further one: 0002.sql."""
    folder = tmp_path / "migrations"
    shutil.copytree(migrate._FOLDER, folder)
    monkeypatch.setattr(migrate, "_FOLDER", folder)
    monkeypatch.setattr(migrate, "VERSIONS", [*VERSIONS, "0002"])
    return folder


async def test_a_migration_that_fails_leaves_nothing(
    processes: Processes, migrations: Path
) -> None:
    good = "CREATE TABLE later (id text PRIMARY KEY);\nINSERT INTO later VALUES ('a');\n"
    (migrations / "0002.sql").write_text(f"{good}CREATE TABLE facts (id text);")
    failing = processes.make()
    await failing.open()
    assert failing.problem
    assert await _inspect(processes, _tables) == set()
    (migrations / "0002.sql").write_text(good)
    assert await _upgrade(processes) == [*VERSIONS, "0002"]
    assert await failing.read(read_version) == "0002"


async def test_an_upgrade_runs_only_what_is_missing(database: Database, migrations: Path) -> None:
    before = await database.read(_facts)
    (migrations / "0002.sql").write_text(
        "-- A comment; with a semicolon\nALTER TABLE facts ADD note text NOT NULL DEFAULT '';"
    )
    assert await database.write(upgrade) == ["0002"]
    assert await database.read(_facts) == before | {"schema": "0002"}
    # The release before works with it, as a fleet is upgraded before its gateways.
    await database.read(check)


async def test_statements_for_one_database_alone(
    processes: Processes, migrations: Path, url: str | None
) -> None:
    dialects = {"sqlite", "postgresql"}
    for dialect in dialects:
        (migrations / f"0002.{dialect}.sql").write_text(f"CREATE TABLE {dialect} (id text);")
    assert await _upgrade(processes) == [*VERSIONS, "0002"]
    expected = {"sqlite"} if url is None else {"postgresql"}
    assert await _inspect(processes, _tables) & dialects == expected
