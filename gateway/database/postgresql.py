"""The database of several gateways: PostgreSQL, over asyncpg."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from gateway.database.connection import Connection, Row, Value
from gateway.database.database import CallFailure, Database, InvalidUrl, Query

T = TypeVar("T")

_CONNECT_TIMEOUT_S = 2.0  # for each host of the URL
_CLOSE_TIMEOUT_S = 5.0
_CLIENT_MARGIN_S = 1.0
"""Seconds for which the client waits longer than the server works on a statement."""
_IDLE_S = 300.0  # an unused connection is closed, so that load spreads over new servers
# SQLSTATE classes and codes of connections that cannot be made or have ended: 08 connection
# exception, 28 invalid authorization, 3D invalid database name, 53300 too many connections, 57P
# the server ends or starts; and of a write at a server that has become a standby.
# See https://www.postgresql.org/docs/current/errcodes-appendix.html
_DOWN = ("08", "28", "3D", "53300", "57P")
_READ_ONLY = "25006"
_UNDEFINED_TABLE = "42P01"
_REASONS = {
    "28P01": "the URL's password is wrong or missing",
    "3D000": "the URL's database does not exist",
    "42501": "the role lacks privileges: `gateway database upgrade` and GATEWAY_USAGE_ROWS_DAYS "
    "need the owner of the tables, and gateways need SELECT, INSERT, UPDATE and DELETE",
    "42P07": "the database has tables of another application",
}
"""Texts for codes whose names do not say what to do."""
_DEFECTS = ("22", "23")  # data exceptions and violated constraints: errors of statements


class PostgresqlDatabase(Database):
    """PostgreSQL 13 or newer, with a pool of connections in each worker process."""

    is_shared = True

    def __init__(
        self, url: str, prepare: Query[None], *, connections: int, timeout_s: float
    ) -> None:
        """Create the object without connecting.

        Args:
            url: The URL of the database, with libpq's parameters: several hosts,
                `target_session_attrs`, `sslmode`, `sslrootcert`, `passfile` and so on.
            prepare: See `Database`.
            connections: Maximum number of connections of this process.
            timeout_s: Maximum duration of a statement, and of the wait for a connection, in
                seconds.
        """
        super().__init__(prepare)
        self._url = url
        self._timeout_s = timeout_s
        self._opening = asyncio.Lock()
        self._is_open = False
        self._pool = asyncpg.create_pool(
            url,
            min_size=0,
            max_size=connections,
            max_inactive_connection_lifetime=_IDLE_S,
            connect=self._connect,
            # Nothing of a transaction remains in a session, so save a round trip for resetting it.
            reset=_reset_nothing,
        )

    async def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                await asyncio.wait_for(self._pool.close(), _CLOSE_TIMEOUT_S)
            except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                self._pool.terminate()

    async def _read(self, query: Query[T]) -> T:
        # A statement outside a transaction takes one round trip instead of three.
        async with self._acquire() as connection:
            return await query(_PostgresqlConnection(connection))

    async def _write(self, change: Query[T]) -> T:
        async with self._acquire() as connection:
            try:
                async with connection.transaction():
                    return await change(_PostgresqlConnection(connection))
            except asyncpg.PostgresError as error:
                if error.sqlstate == _READ_ONLY:
                    # After a failover, the old server is a standby. Connect to the new one.
                    await self._pool.expire_connections()
                raise

    @asynccontextmanager
    async def _acquire(self) -> AsyncIterator[Any]:
        if not self._is_open:
            async with self._opening:
                if not self._is_open:
                    await self._pool
                    self._is_open = True
        connection = await self._pool.acquire(timeout=self._timeout_s + _CLIENT_MARGIN_S)
        try:
            yield connection
        except asyncpg.InternalClientError:
            # A call between the server's last message and the end of the connection. asyncpg does
            # not return the connection to its pool then.
            connection.terminate()
            raise
        finally:
            await self._pool.release(connection)

    async def _connect(self, *_: object, **options: Any) -> Any:
        """Connect to the first host of the URL that answers in time.

        asyncpg's timeout is for all hosts together, so a host that is silent would use it up.
        """
        milliseconds = int(self._timeout_s * 1000)
        settings = {
            "application_name": "triton-openai-gateway",
            "statement_timeout": str(milliseconds),
            "lock_timeout": str(milliseconds // 2),
            "idle_in_transaction_session_timeout": str(milliseconds),
        }
        options |= {
            "timeout": _CONNECT_TIMEOUT_S,
            "command_timeout": self._timeout_s + _CLIENT_MARGIN_S,
            "server_settings": settings,
        }
        *others, last = _split_hosts(self._url)
        for url in others:
            try:
                return await _connect_to(url, options)
            except Exception as error:
                # Try the next host if this one is down, starting, or not the wanted primary.
                failure = self._explain(error)
                if failure is None or not failure.is_down:
                    raise
        return await _connect_to(last, options)

    def _explain(self, error: Exception) -> CallFailure | None:
        if isinstance(error, asyncpg.PostgresError):
            state = error.sqlstate or ""
            if state.startswith(_DEFECTS):
                return None
            reason = _REASONS.get(state) or _to_words(type(error).__name__.removesuffix("Error"))
            is_down = state.startswith(_DOWN) or state == _READ_ONLY
            return CallFailure(f"{reason} (SQLSTATE {state})", is_down, state == _UNDEFINED_TABLE)
        reason = next((text(error) for kind, text in _LOST.items() if isinstance(error, kind)), "")
        return CallFailure(reason, is_down=True) if reason else None


def _describe_os_error(error: Any) -> str:
    # asyncio's own text has the address.
    return os.strerror(error.errno).lower() if error.errno else "no connection can be made"


_LOST: dict[type[Exception], Callable[[Any], str]] = {
    asyncpg.TargetServerAttributeNotMatched: lambda _: "no host is as target_session_attrs says",
    TimeoutError: lambda _: "it does not answer in time",
    ssl.SSLError: lambda error: f"TLS fails: {error.reason or 'unknown reason'}",
    socket.gaierror: lambda _: "its host name cannot be resolved",
    OSError: _describe_os_error,
    asyncpg.InterfaceError: lambda _: "the connection was lost",
    asyncpg.InternalClientError: lambda _: "the connection was lost",
}
"""Reasons for errors of connections. The first class that fits counts."""


async def _connect_to(url: str, options: dict[str, Any]) -> Any:
    try:
        return await asyncpg.connect(url, **options)
    except (ValueError, OverflowError) as error:
        # asyncpg parses the URL when it connects. Errors of Python may quote a password.
        text = "the URL is not one of PostgreSQL"
        if isinstance(error, asyncpg.InterfaceError):
            text = f"{text}: {str(error).partition(chr(10))[0]}"
        else:
            text = f"{text}; in the password, / is written as %2F, @ as %40, : as %3A, # as %23"
        raise InvalidUrl(text) from error
    except asyncpg.UndefinedObjectError as error:
        raise InvalidUrl("the URL has a parameter that PostgreSQL does not know") from error


def _split_hosts(url: str) -> list[str]:
    """Return a URL for each host of a URL: ``//u:p@a/d`` and ``//u:p@b/d`` for ``//u:p@a,b/d``."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return [url]  # asyncpg reports what is wrong
    user, at, hosts = parts.netloc.rpartition("@")
    return [urlunsplit(parts._replace(netloc=f"{user}{at}{host}")) for host in hosts.split(",")]


class _PostgresqlConnection(Connection):
    is_postgresql = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def fetch(self, sql: str, *values: Value) -> Sequence[Row]:
        rows: Sequence[Row] = await self._connection.fetch(sql, *values)
        return rows

    async def execute_many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        await self._connection.executemany(sql, rows)


async def _reset_nothing(_: object) -> None:
    pass


def _to_words(name: str) -> str:
    """Return "too many connections" for "TooManyConnections"."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
