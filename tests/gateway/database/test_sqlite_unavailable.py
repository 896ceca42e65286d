"""A SQLite file that is locked, damaged, replaced or unwritable: a process needs no restart."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest

from gateway.database import database as database_module
from gateway.database import sqlite as sqlite_module
from gateway.database.connection import Connection
from gateway.database.database import Database
from gateway.database.migrate import read_fact, write_fact
from gateway.database.opening import make_database
from gateway.database.sqlite import FILE
from gateway.errors import DatabaseUnavailable
from tests.gateway.database.conftest import SQLITE, Gate, Processes
from tests.support.patience import PATIENCE_S

NAME = "probe"  # of a fact
NOBODY = 65534  # a user id that owns no files
# Holds the lock of writers until stdin is closed.
_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=300)
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE facts SET value = 'of the other process' WHERE name = 'probe'")
print("locked", flush=True)
sys.stdin.read()
"""

read = partial(read_fact, name=NAME)
write = partial(write_fact, name=NAME)


@pytest.fixture(params=[SQLITE])
def url() -> None:
    return None


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "@database" / FILE


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Let another process hold the lock of writers, and end without committing."""
    command = [sys.executable, "-c", _LOCK, str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield
        process.kill()


async def _refused(database: Database, value: str = "never stored") -> str:
    with pytest.raises(DatabaseUnavailable) as caught:
        await database.write(partial(write, value=value))
    assert database.problem == caught.value.why
    return caught.value.why


async def _works(database: Database) -> None:
    await database.write(partial(write, value="again"))
    assert await database.read(read) == "again"
    assert not database.problem


async def test_a_lock_of_another_process_is_waited_for(
    file: Path, processes: Processes, gate: Gate
) -> None:
    """Check with the ordinary timeout: both transactions are committed, one after the other."""
    database, other = await processes.start(), await processes.start()

    async def hold(connection: Connection) -> None:
        await gate.wait(connection)
        await write_fact(connection, "held", "1")

    held = asyncio.create_task(other.write(hold))
    await gate.reached.wait()
    waiting = asyncio.create_task(database.write(partial(write, value="waited")))
    assert await database.read(read) is None
    gate.open()
    await held
    await waiting
    assert await other.read(read) == "waited"


async def test_a_lock_that_is_held_for_too_long(
    file: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_module, "_BUSY_TIMEOUT_S", 0.1)
    database, other = await processes.start(), await processes.start()
    await database.write(partial(write, value="before"))
    assert await database.read(read) == "before"
    with _locked(file):
        assert await _refused(database) == "database is locked"
        # Reads need no lock: neither in a connection that is open, nor in a new one.
        assert await database.read(read) == "before"
        assert await other.read(read) == "before"
        assert await _refused(database) == "database is locked"
        assert await database.read(read) == "before"
        assert database.problem  # a read says nothing about writes
        monkeypatch.setattr(database_module, "_REPORTED_S", 0.0)
        assert not database.problem  # the failure was long ago
    await _works(database)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("damage", ["header", "pages", "cut"])
async def test_a_damaged_file_that_is_restored(
    file: Path, processes: Processes, damage: str, in_place: bool
) -> None:
    """Check that damage is reported, and that a backup needs no restart of the process."""
    backup = await _backup(file, processes)
    damaged = {
        "header": b"\xff" * 4096 + backup[4096:],
        "pages": backup[:4096] + b"\xff" * (len(backup) - 4096),
        "cut": backup[:5000],
    }[damage]
    file.write_bytes(damaged)
    database = processes.make()
    await database.open()
    await _refused(database)
    with pytest.raises(DatabaseUnavailable):
        await database.read(read)
    _restore(file, backup, in_place=in_place)
    assert await database.read(read) == "before"
    await _works(database)
    await processes.end(database)
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert ("again",) in connection.execute("SELECT value FROM facts").fetchall()


async def _backup(file: Path, processes: Processes) -> bytes:
    """Return a file with the fact "before"."""
    database = await processes.start()
    await database.write(partial(write, value="before"))
    await processes.end(database)
    return file.read_bytes()


def _restore(file: Path, backup: bytes, *, in_place: bool) -> None:
    for left in file.parent.glob(f"{FILE}-*"):
        left.unlink()
    new = file if in_place else file.with_name("backup")
    new.write_bytes(backup)
    new.rename(file)


async def test_a_file_that_is_replaced_while_it_is_open(file: Path, processes: Processes) -> None:
    """Check that nothing is read from or written to the file that is no longer there."""
    backup = await _backup(file, processes)
    database = await processes.start()
    await _works(database)
    _restore(file, backup, in_place=False)
    assert await database.read(read) == "before"
    await database.write(partial(write, value="after"))
    other = await processes.start()
    assert await other.read(read) == "after"


async def test_a_folder_that_is_removed_while_the_file_is_open(
    file: Path, processes: Processes
) -> None:
    """Check that nothing is reported as stored that no other process can read."""
    database = await processes.start()
    await _works(database)
    shutil.rmtree(file.parent)
    for _ in range(2):
        await _refused(database)  # an empty file is another database
    assert await (await processes.start()).read(read) is None


async def test_a_start_and_reads_write_nothing(file: Path, processes: Processes) -> None:
    backup = await _backup(file, processes)
    for _ in range(2):
        database = await processes.start()
        assert await database.read(read) == "before"
        assert not file.with_name(f"{FILE}-wal").stat().st_size
        await processes.end(database)
    assert file.read_bytes() == backup


async def test_an_empty_file_gets_its_tables(file: Path, processes: Processes) -> None:
    file.parent.mkdir()
    file.touch()
    await _works(await processes.start())


@contextmanager
def _unprivileged() -> Iterator[None]:
    """Let this process, with all its threads, write only what everybody may write."""
    if os.getuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
async def at_open_folder() -> AsyncIterator[tuple[Path, Database]]:
    """Yield a database below a folder that every user may open, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        database = make_database(folder / "state", None, connections=1, timeout_s=PATIENCE_S)
        yield folder, database
        await database.close()


async def test_a_folder_that_becomes_writable(at_open_folder: tuple[Path, Database]) -> None:
    folder, database = at_open_folder
    folder.chmod(0o555)
    with _unprivileged():
        await database.open()
        assert await _refused(database) == "permission denied"
        with pytest.raises(DatabaseUnavailable, match="try again"):
            await database.read(read)
    folder.chmod(0o755)
    await _works(database)
    assert (folder / "state" / "@database").stat().st_mode & 0o777 == 0o700
    modes = {path.stat().st_mode & 0o777 for path in (folder / "state" / "@database").iterdir()}
    assert modes == {0o600}


async def test_a_folder_that_is_a_file(tmp_path: Path, file: Path, processes: Processes) -> None:
    file.parent.write_text("")
    database = processes.make()
    await database.open()
    assert await _refused(database) == "file exists"
    file.parent.unlink()
    await _works(database)
