"""The database of one gateway: a SQLite file in its state folder, shared by its workers."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TypeVar

from gateway.database.connection import Connection, Row, Value, run_now
from gateway.database.database import CallFailure, Database, Query

T = TypeVar("T")

FILE = "gateway.sqlite"
_BUSY_TIMEOUT_S = 5.0
_MAX_LOG_BYTES = 16 * 1024 * 1024
_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = FULL",  # a committed transaction survives a loss of power
    "foreign_keys = ON",
    f"journal_size_limit = {_MAX_LOG_BYTES}",
)
_DEFECTS = (
    sqlite3.IntegrityError,
    sqlite3.ProgrammingError,
    sqlite3.InterfaceError,
    sqlite3.DataError,
)
"""Errors of statements and their values, which another attempt would raise again."""


class SqliteDatabase(Database):
    """A SQLite file in WAL mode, with one thread for reads and one for writes."""

    is_shared = False

    def __init__(self, folder: Path, prepare: Query[None]) -> None:
        """Create the object without opening the file `FILE` in `folder`."""
        super().__init__(prepare)
        self._reader = _Thread(folder, "BEGIN")
        self._writer = _Thread(folder, "BEGIN IMMEDIATE")

    async def _close(self) -> None:
        await self._reader.close()
        await self._writer.close()

    async def _read(self, query: Query[T]) -> T:
        return await self._reader.run(query)

    async def _write(self, change: Query[T]) -> T:
        return await self._writer.run(change)

    def _is_replaced(self) -> bool:
        return self._writer.is_replaced

    def _explain(self, error: Exception) -> CallFailure | None:
        if isinstance(error, sqlite3.Error) and not isinstance(error, _DEFECTS):
            reason = str(error) or type(error).__name__
            # The file was replaced by an empty one.
            return CallFailure(reason, is_foreign=reason.startswith("no such table"))
        if isinstance(error, OSError):
            return CallFailure((error.strerror or type(error).__name__).lower())
        return None


class _Thread:
    """A thread with a connection, in which each transaction begins with the statement `begin`."""

    def __init__(self, folder: Path, begin: str) -> None:
        self._folder = folder
        self._begin = begin
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="database")
        self._connection: sqlite3.Connection | None = None
        self._stamp: _Stamp = None

    @property
    def is_replaced(self) -> bool:
        """True if the file is no longer the one that the connection has opened.

        What is written to a deleted file would be lost.
        """
        return self._stamp != _read_stamp(self._folder)

    async def run(self, query: Query[T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, query)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._disconnect)
        await asyncio.to_thread(self._thread.shutdown)

    def _run(self, query: Query[T]) -> T:
        if self._connection is not None and self.is_replaced:
            self._disconnect()
        if self._connection is None:
            self._connection = _connect(self._folder)
            self._stamp = _read_stamp(self._folder)
        connection = self._connection
        try:
            connection.execute(self._begin)
            result = run_now(query(_SqliteConnection(connection)))
            connection.execute("COMMIT")
        except BaseException as error:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.Error):
                self._disconnect()  # the file may have been replaced, or repaired
            raise
        return result

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _SqliteConnection(Connection):
    is_postgresql = False

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    async def fetch(self, sql: str, *values: Value) -> Sequence[Row]:
        return self._connection.execute(_translate(sql), values).fetchall()

    async def execute_many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        self._connection.executemany(_translate(sql), rows)


@cache
def _translate(sql: str) -> str:
    """Return a statement with placeholders of SQLite: ``?1`` for ``$1``."""
    return sql.replace("$", "?")


_Stamp = tuple[int, int] | None
"""Device and inode of the file; None if it does not exist."""


def _read_stamp(folder: Path) -> _Stamp:
    try:
        status = os.stat(folder / FILE)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _connect(folder: Path) -> sqlite3.Connection:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Create the file here to set its mode. SQLite creates its log with the same mode. Never open a
    # file that exists: closing it would release the locks that other connections of this process
    # hold on it (fcntl(2)), and another process could delete the log that they write.
    with suppress(FileExistsError):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(folder / FILE, flags, 0o600))
    connection = sqlite3.connect(
        folder / FILE,
        timeout=_BUSY_TIMEOUT_S,
        isolation_level=None,  # transactions begin and end where this module says
        cached_statements=256,
    )
    try:
        if connection.execute("PRAGMA page_count").fetchone() == (0,):
            # Only effective in an empty file. In another one it would write a page.
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
    except BaseException:
        connection.close()
        raise
    return connection
