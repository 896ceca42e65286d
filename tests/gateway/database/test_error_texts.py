"""Reasons of failures, which operators read: they quote no password, address or value."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from gateway.database.connection import Connection
from gateway.database.database import Database, InvalidUrl, Query
from gateway.database.migrate import read_fact, write_fact
from gateway.database.opening import make_database
from gateway.errors import DatabaseUnavailable
from ops.local_stack.ports import PortClaims
from tests.support.patience import PATIENCE_S
from tests.support.postgresql_server import PostgresqlServer
from tests.support.upgraded_database import create_tables, upgrade_database

SECRET = "s3cret-value"
SHORT_S = 0.2

pytestmark = pytest.mark.usefixtures("no_pause")


@pytest.fixture(scope="module")
def url(postgresql: PostgresqlServer) -> Iterator[str]:
    with postgresql.database() as url:
        upgrade_database(url)
        yield url


def _make(url: str | None, folder: Path, timeout_s: float = PATIENCE_S) -> Database:
    options: dict[str, Any] = {"connections": 1, "timeout_s": timeout_s}
    return make_database(folder, url, prepare=create_tables, **options)


@dataclass
class Texts:
    """All texts of failures of a database, and what they must not contain."""

    caplog: pytest.LogCaptureFixture
    found: list[str]

    async def check(
        self, database: Database, call: Callable[[], Awaitable[object]], *secrets: str
    ) -> str:
        """Check that the call fails, and that the texts about that have no secret."""
        with pytest.raises(DatabaseUnavailable) as caught:
            await call()
        reason = caught.value.why
        assert database.problem == reason
        assert reason in self.caplog.text
        self.found += [reason, str(caught.value), caught.value.message, self.caplog.text]
        shown = [each for each in secrets if any(each in text for text in self.found)]
        assert not shown, self.found
        return reason


@pytest.fixture
def texts(caplog: pytest.LogCaptureFixture) -> Texts:
    caplog.set_level(logging.DEBUG)
    # asyncpg's and asyncio's debug messages are for who asks for them.
    logging.getLogger("asyncio").setLevel(logging.INFO)
    return Texts(caplog, [])


def _secrets(url: str) -> tuple[str, ...]:
    parts = urlsplit(url)
    return tuple(map(str, (parts.username, parts.password, parts.hostname, parts.port)))


def _change(url: str, change: str, claims: PortClaims) -> str:
    parts = urlsplit(url)
    login, host = f"{parts.username}:{parts.password}@", f"{parts.hostname}:{parts.port}"
    return {
        "password": lambda: url.replace(f":{parts.password}@", ":another-password@"),
        "role": lambda: url.replace(login, f"another-role:{parts.password}@"),
        "database": lambda: f"postgresql://{login}{host}/another-database",
        "port": lambda: url.replace(host, f"{parts.hostname}:{claims.take_free()}"),
        "host": lambda: url.replace(host, "another-host.invalid:5432"),
        "encryption": lambda: f"{url}?sslmode=require",
        "attributes": lambda: f"{url}?target_session_attrs=standby",
    }[change]()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("password", "SQLSTATE 28P01"),
        ("role", "SQLSTATE 28P01"),
        ("database", "SQLSTATE 3D000"),
        ("port", "connection refused"),
        ("host", "cannot be resolved"),
        ("encryption", "no connection can be made"),
        ("attributes", "target_session_attrs"),
    ],
)
async def test_a_connection_that_cannot_be_made(
    url: str, change: str, reason: str, tmp_path: Path, texts: Texts
) -> None:
    with PortClaims() as claims:
        changed = _change(url, change, claims)
        database = _make(changed, tmp_path)
        await database.open()
        secrets = {*_secrets(url), *_secrets(changed)} - {"gateway"}
        found = await texts.check(
            database, partial(database.read, partial(read_fact, name="a")), *secrets
        )
        assert reason in found
        await database.close()


@pytest.mark.parametrize(
    "wrong",
    [
        "postgresql://gateway:s3/cret@127.0.0.1/gateway",  # not quoted: %2F
        "postgresql://gateway:s3[cret@127.0.0.1/gateway",
        "postgresql://gateway:cret@127.0.0.1:s3/gateway",
        "postgresql://gateway:cret@127.0.0.1/gateway?sslmode=wrong",
        "postgresql://gateway:cret@127.0.0.1/gateway?target_session_attrs=wrong",
    ],
)
async def test_a_wrong_url_ends_the_start(
    wrong: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = _make(wrong, tmp_path)
    with pytest.raises(InvalidUrl) as caught:
        await database.open()
    shown = "".join(traceback.format_exception_only(caught.value)) + caplog.text
    assert not re.search("s3|cret|127", shown)
    assert caught.value.__suppress_context__  # asyncpg's error quotes parts of the URL


async def test_an_unknown_parameter_ends_the_start(url: str, tmp_path: Path) -> None:
    database = _make(f"{url}?another_parameter=1", tmp_path)
    with pytest.raises(InvalidUrl):
        await database.open()
    await database.close()


async def test_a_password_that_is_set_later_needs_no_restart(
    postgresql: PostgresqlServer, url: str, tmp_path: Path
) -> None:
    login = f"{urlsplit(url).username}:{urlsplit(url).password}@"
    database = _make(url.replace(login, f"late:{SECRET}@"), tmp_path)
    postgresql.execute("CREATE ROLE late LOGIN PASSWORD 'former' IN ROLE gateway")
    try:
        await database.open()
        assert database.problem
        postgresql.execute(f"ALTER ROLE late PASSWORD '{SECRET}'")
        await database.write(partial(write_fact, name="late", value="1"))
        assert not database.problem
        await database.close()
    finally:
        postgresql.execute("DROP ROLE late")


async def _sleep(connection: Connection) -> None:
    await connection.fetch(f"SELECT pg_sleep(60), $1::text, '{SECRET}'", SECRET)


async def _lack_a_table(connection: Connection) -> None:
    await connection.fetch(f"SELECT $1 || '{SECRET}' FROM lacking", SECRET)


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        (_sleep, "query canceled (SQLSTATE 57014)"),
        (_lack_a_table, "undefined table (SQLSTATE 42P01)"),
    ],
)
async def test_a_statement_that_fails(
    url: str, query: Query[None], reason: str, tmp_path: Path, texts: Texts
) -> None:
    database = _make(url, tmp_path, SHORT_S)
    await database.open()
    for call in (database.read, database.write):
        found = await texts.check(database, partial(call, query), SECRET, *_secrets(url)[1:])
        assert found == reason
    await database.close()


async def test_a_statement_that_sqlite_refuses(tmp_path: Path, texts: Texts) -> None:
    database = _make(None, tmp_path)
    await database.open()
    found = await texts.check(database, partial(database.write, _lack_a_table), SECRET)
    assert found == "no such table: lacking"
    await database.close()
