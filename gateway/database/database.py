"""Class `Database`: transactions, each in a task of its own, and the error if they are impossible.

See decision 097 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from gateway.database.connection import Connection
from gateway.errors import DatabaseUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")
Query = Callable[[Connection], Coroutine[Any, Any, T]]
"""A function that reads or changes rows. It may run again after a transaction that has failed."""

_PAUSE_S = 1.0
"""Seconds after a failed connection in which further calls fail at once."""
_REPORTED_S = 60.0
"""Seconds for which a failure is reported, unless a call of the same kind succeeds before."""


class SchemaMismatch(Exception):
    """This release does not work with the schema of the database. The text says what to do."""


class InvalidUrl(Exception):
    """The URL of the database is invalid. The text does not quote the URL."""


class CallFailure(NamedTuple):
    """Explanation of a failed call.

    Attributes:
        reason: Text for operators, without values of statements, addresses and passwords.
        is_down: True if no connection can be made, or the connection was lost.
        is_foreign: True if the database lacks a table: it was replaced by another one.
    """

    reason: str
    is_down: bool = False
    is_foreign: bool = False


class Database(ABC):
    """Runs functions on the database, each in a transaction of its own.

    Await `open` first, and `close` at the end.

    Attributes:
        is_shared: True if gateways on other machines can use the same database.
        failures: Number of calls that have failed since the start.
    """

    is_shared: bool

    def __init__(self, prepare: Query[None]) -> None:
        """Create the object without connecting.

        `prepare` runs once, before any other function. It raises SchemaMismatch if this release
        does not work with the database.
        """
        self.failures = 0
        self._prepare = prepare
        self._is_prepared = False
        self._preparing = asyncio.Lock()
        self._identity: str | None = None
        self._problems: dict[str, tuple[str, float]] = {}
        """Reasons of failed calls, and the times of the last failures, by kind of call.

        The kind is "" for calls that could not connect, else "read" or "write": a full disk refuses
        writes, and a successful read must not end the report. Times are of `time.monotonic`.
        """
        self._down_until = 0.0
        self._down_cause: Exception | None = None
        self._running: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Prepare the database. If it is unavailable, the next call prepares it.

        Raise SchemaMismatch or InvalidUrl if a retry would fail again.
        """
        try:
            await self._finish(self._prepare_once(), "write")
        except DatabaseUnavailable as error:
            if isinstance(error.__cause__, SchemaMismatch | InvalidUrl):
                raise error.__cause__ from None

    async def close(self) -> None:
        """Wait for the calls that are running, and close the connections."""
        if self._running:
            await asyncio.wait(self._running)
        await self._close()

    @property
    def problem(self) -> str:
        """Reason why calls fail; empty while they succeed.

        A failed write is reported for a minute, or until a write succeeds.
        """
        now = time.monotonic()
        recent = [why for why, at in self._problems.values() if now < at + _REPORTED_S]
        return recent[0] if recent else ""

    async def read(self, query: Query[T]) -> T:
        """Return the result of `query`, which executes statements that change no rows.

        Raise DatabaseUnavailable if the database does not answer in time.
        """
        return await self._finish(self._run_prepared(query, self._read), "read")

    async def write(self, change: Query[T]) -> T:
        """Run `change` in a transaction. Return its result once the transaction is committed.

        If `change` raises, nothing is changed. If DatabaseUnavailable is raised, the transaction
        may have been committed: the connection may have been lost before the answer arrived.
        """
        return await self._finish(self._run_prepared(change, self._write), "write")

    @abstractmethod
    async def _close(self) -> None: ...

    @abstractmethod
    async def _read(self, query: Query[T]) -> T: ...

    @abstractmethod
    async def _write(self, change: Query[T]) -> T: ...

    def _is_replaced(self) -> bool:
        """Return True if another database is there than at the last call."""
        return False

    @abstractmethod
    def _explain(self, error: Exception) -> CallFailure | None:
        """Return None for errors of other code, of statements and of their values."""

    async def _prepare_once(self) -> None:
        async with self._preparing:
            self._check_pause()  # another call may have failed while this one waited
            if not self._is_prepared:
                await self._write(self._prepare)
                identity = await self._read(read_identity)
                if self._identity not in (None, identity):
                    raise SchemaMismatch("it is another database than before; restart the gateway")
                self._identity = identity
                self._is_prepared = True
                self._problems.pop("write", None)  # `open` reports its failure as a write

    async def _run_prepared(self, query: Query[T], run: Callable[[Query[T]], Awaitable[T]]) -> T:
        if self._is_prepared and self._is_replaced():
            self._is_prepared = False
        if not self._is_prepared:
            await self._prepare_once()
        return await run(query)

    def _check_pause(self) -> None:
        if time.monotonic() < self._down_until:
            raise DatabaseUnavailable(self.problem) from self._down_cause

    async def _finish(self, work: Coroutine[Any, Any, T], kind: str) -> T:
        """Await `work` in a task of its own, and turn the errors of the driver into ours.

        A client that disconnects cancels its request. To cancel a query of PostgreSQL takes another
        connection, and a cancelled query leaves its connection unusable. So the task is not
        cancelled.
        """
        try:
            self._check_pause()
        except DatabaseUnavailable:
            work.close()
            raise
        task = asyncio.create_task(self._translate(work, kind))
        self._running.add(task)
        task.add_done_callback(self._end)
        return await asyncio.shield(task)

    def _end(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieve it: a caller that was cancelled does not

    async def _translate(self, work: Coroutine[Any, Any, T], kind: str) -> T:
        try:
            found = await work
        except DatabaseUnavailable:
            raise
        except Exception as error:
            failure = self._explain(error)
            if isinstance(error, SchemaMismatch | InvalidUrl):
                failure = CallFailure(str(error), is_foreign=True)
            if failure is None:
                raise
            self._record(failure, kind)
            self._down_cause = error
            raise DatabaseUnavailable(failure.reason) from error
        self._down_until, self._down_cause = 0.0, None
        if self._problems:
            self._problems.pop("", None)
            self._problems.pop(kind, None)
            if not self._problems:
                log.info("the database answers again")
        return found

    def _record(self, failure: CallFailure, kind: str) -> None:
        self.failures += 1
        if failure.is_down or failure.is_foreign:
            # The next call may find another database: after a failover, or a restored backup.
            self._is_prepared = False
        now = time.monotonic()
        if failure.is_down:
            kind, self._down_until = "", now + _PAUSE_S
        why, at = self._problems.get(kind, ("", now))
        if failure.reason != why or now >= at + _REPORTED_S:
            log.error("the database fails: %s", failure.reason)
        self._problems[kind] = failure.reason, now


async def read_identity(connection: Connection) -> str | None:
    """Return the random UUID of the database; None if it has none yet."""
    found: str | None = await connection.fetch_value(
        "SELECT value FROM facts WHERE name = 'identity'"
    )
    return found
