"""Program that runs a SQLite database on a disk whose n-th write or synchronization fails.

    LD_PRELOAD=failing_disk.so python -m tests.gateway.database.failing_disk FOLDER START FAILURES

`test_failing_disk.py` compiles failing_disk.c and starts this program. The program raises n until
all calls succeed, and prints how often each phase had a failure.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import itertools
import json
import shutil
import sqlite3
import sys
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from gateway.database import sqlite as sqlite_module
from gateway.database.connection import Connection
from gateway.database.database import Database
from gateway.database.migrate import write_fact
from gateway.database.opening import make_database
from gateway.database.sqlite import FILE
from gateway.errors import DatabaseUnavailable

EMPTY, WITH_LOG = "empty", "with-log"
"""Contents of the folder at the start: nothing, or the files of a process that was killed."""
ONCE, FROM_THEN_ON = "once", "from-then-on"
"""Calls that fail: the n-th alone, or also all that follow, as on a full disk."""
_ROWS = 3
_ROW_BYTES = 3000  # each row takes a page of its own
# Checkpoints after each of these transactions, so that writes of the file itself fail, too.
_PRAGMAS = (*sqlite_module._PRAGMAS, "wal_autocheckpoint = 5")

_disk = ctypes.CDLL(None)  # has the functions of failing_disk.c


def _fail_calls(first: int, last: int, error: int) -> None:
    _disk.fail_calls(ctypes.c_long(first), ctypes.c_long(last), error)


def _repair() -> None:
    _fail_calls(0, 0, 0)


async def _insert(connection: Connection, name: str) -> None:
    for number in range(_ROWS):
        row = f"{name} {number}", name.ljust(_ROW_BYTES)
        await connection.fetch("INSERT INTO facts (name, value) VALUES ($1, $2)", *row)


async def _read(connection: Connection) -> dict[str, int]:
    sql = "SELECT name FROM facts WHERE name LIKE '% _'"
    return Counter(name.split()[0] for (name,) in await connection.fetch(sql))


def _make(store: Path) -> Database:
    return make_database(store, None, connections=1, timeout_s=1)


async def _commit(database: Database, name: str) -> bool:
    """Insert rows, and return whether that succeeded."""
    try:
        await database.write(partial(_insert, name=name))
    except DatabaseUnavailable:
        assert database.problem
        return False
    # A loss of power must not undo what is reported as committed.
    assert not _disk.count_unsynced(), "the log was not synchronized"
    return True


def _check_copy(store: Path, copy: Path, committed: list[str], uncertain: str) -> None:
    """Check what another process would find if this one were killed now."""
    copy.mkdir()
    for suffix in ("", "-wal"):
        file = store / "@database" / f"{FILE}{suffix}"
        if file.exists():
            shutil.copy(file, copy / f"copy{suffix}")  # a name for which the disk does not fail
    with closing(sqlite3.connect(copy / "copy")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master")]
        rows = list(connection.execute("SELECT name FROM facts")) if "facts" in names else []
    found = Counter(name.split()[0] for (name,) in rows if " " in name)
    assert all(found[name] == _ROWS for name in committed), (found, committed)
    assert found[uncertain] in (0, _ROWS), found
    shutil.rmtree(copy)


async def _run(store: Path, first: int, last: int, before: list[str]) -> list[str]:
    """Open, write and close, and check the result. Return the phases in which calls failed."""
    failed = []
    copy = store.with_name("copy")
    database = _make(store)
    _fail_calls(first, last, errno.EIO if first == last else errno.ENOSPC)
    await database.open()
    if database.problem:
        failed.append("open")
    committed = list(before)
    for name in ("one", "two"):
        if await _commit(database, name):
            committed.append(name)
        else:
            failed.append("write")
        _check_copy(store, copy, committed, name)
    with suppress(DatabaseUnavailable):  # a small transaction, which `close` moves to the file
        await database.write(partial(write_fact, name="small", value="1"))
    if first <= _disk.count_calls():
        failed = failed or ["checkpoint"]
    else:
        await database.close()
        if first <= _disk.count_calls():
            failed = ["close"]
        database = _make(store)
    _repair()
    # This process needs no restart.
    assert await _commit(database, "three"), database.problem
    found = await database.read(_read)
    assert all(found[name] == _ROWS for name in (*committed, "three")), (found, committed)
    assert set(found.values()) == {_ROWS}, found
    assert not database.problem
    await database.close()
    _check_copy(store, copy, [*committed, "three"], "none")
    return failed


async def _prepare(store: Path, start: str) -> list[str]:
    """Write the files of the start to `store`, and return what they have committed."""
    if start == EMPTY:
        return []
    database = _make(store.with_name("killed"))
    await database.open()
    assert await _commit(database, "before")
    shutil.copytree(store.with_name("killed"), store)
    await database.close()
    shutil.rmtree(store.with_name("killed"))
    return ["before"]


async def main(folder: Path, start: str, failures: str) -> None:
    vars(sqlite_module)["_PRAGMAS"] = _PRAGMAS
    counts: Counter[str] = Counter()
    for first in itertools.count(1):
        store = folder / "store"
        before = await _prepare(store, start)
        failed = await _run(store, first, first if failures == ONCE else sys.maxsize, before)
        shutil.rmtree(store)
        if not failed:
            break
        counts.update(failed)
    print(json.dumps(counts))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
