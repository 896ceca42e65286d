"""`gateway database`: tables of PostgreSQL and SQLite, and the import of the former state."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from gateway.former_state import overrides as former_overrides
from gateway.former_state.keys import KEYS
from gateway.tenancy.keys.record import make_record
from ops.cli import main
from tests.support.postgresql_server import PostgresqlServer
from tests.support.redis_server import RedisServer, running_redis

SECRET = "a-password-of-redis"


class Ended(NamedTuple):
    code: int
    stdout: str
    stderr: str


Run = Callable[..., Ended]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Return a function that runs `gateway database` with settings, in this process."""

    def run_command(*arguments: str, **settings: str) -> Ended:
        with monkeypatch.context() as environment:
            for name in [name for name in os.environ if "GATEWAY_" in name]:
                environment.delenv(name)
            for name, value in {"store_dir": str(tmp_path), **settings}.items():
                environment.setenv(f"GATEWAY_{name.upper()}", value)
            code = main(["database", *arguments])
        return Ended(code, *capsys.readouterr())

    return run_command


def test_tables_are_created_once(
    run: Run, postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    first, second = (run("upgrade", database_url=postgresql_url) for _ in range(2))
    assert (first.code, first.stderr) == (0, "")
    assert first.stdout == "the schema has version 0001; migrations run: 0001\n"
    assert second == (0, "the schema has version 0001; migrations run: none\n", "")
    name = postgresql_url.rpartition("/")[2]
    assert postgresql.execute("SELECT count(*) FROM api_keys", name) == "0"


def test_the_command_as_a_process(postgresql: PostgresqlServer, postgresql_url: str) -> None:
    """Run the command as an operator does, without the settings of a model."""
    env = {name: value for name, value in os.environ.items() if "GATEWAY_" not in name}
    env["GATEWAY_DATABASE_URL"] = postgresql_url
    command = [sys.executable, "-m", "ops", "database", "upgrade"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("the schema has version")
    assert postgresql.password not in ended.stdout


def test_a_newer_schema_is_left_alone(
    run: Run, postgresql: PostgresqlServer, postgresql_url: str
) -> None:
    assert run("upgrade", database_url=postgresql_url).code == 0
    name = postgresql_url.rpartition("/")[2]
    newest = "UPDATE facts SET value = '9999' WHERE name IN ('schema', 'readable_from')"
    postgresql.execute(newest, name)
    for command in ("upgrade", "import"):
        ended = run(command, database_url=postgresql_url)
        assert (ended.code, ended.stdout) == (1, "")
        assert ended.stderr.startswith(
            "gateway database: the schema of the database has version 9999"
        )
        assert "run a newer release" in ended.stderr


def test_nothing_is_imported_into_a_database_without_tables(run: Run, postgresql_url: str) -> None:
    ended = run("import", database_url=postgresql_url)
    assert (ended.code, ended.stdout) == (1, "")
    assert "run `gateway database upgrade`" in ended.stderr


@pytest.mark.parametrize("command", [("upgrade",), ("upgrade", "--if-available"), ("import",)])
def test_a_database_that_cannot_be_used(
    run: Run, postgresql: PostgresqlServer, command: tuple[str, ...]
) -> None:
    stopped = postgresql.url.replace(f":{postgresql.port}/", ":1/")
    wrong = postgresql.url.replace(postgresql.password, SECRET)
    unavailable = 0 if "--if-available" in command else 3
    for url, code, why in ((stopped, unavailable, "refused"), (wrong, 1, "password")):
        ended = run(*command, database_url=url)
        assert (ended.code, ended.stdout) == (code, "")
        assert ended.stderr.startswith("gateway database: ")
        assert why in ended.stderr
        assert "Traceback" not in ended.stderr
        assert SECRET not in ended.stderr
        assert postgresql.password not in ended.stderr


def test_settings_that_are_wrong(run: Run) -> None:
    ended = run("upgrade", database_url=f"mysql://root:{SECRET}@localhost/gateway")
    assert (ended.code, ended.stdout) == (2, "")
    assert "GATEWAY_DATABASE_URL" in ended.stderr
    assert SECRET not in ended.stderr
    ended = run("import", databse_url="postgresql://localhost/gateway")
    assert (ended.code, ended.stdout) == (2, "")
    assert "GATEWAY_DATABSE_URL" in ended.stderr
    ended = run("upgrade")
    assert (ended.code, ended.stdout) == (2, "")
    assert "GATEWAY_DATABASE_URL is not set" in ended.stderr


def test_the_former_state_is_imported_once(run: Run, tmp_path: Path, postgresql_url: str) -> None:
    record, _ = make_record("acme", "", None, "sha256:" + "a" * 8)
    ended_record, _ = make_record("acme", "", None, "sha256:" + "a" * 8)
    _write_keys(tmp_path, record.model_dump(), ended_record.model_dump())
    with running_redis() as redis:
        with redis.client() as client:
            ended_record = ended_record.model_copy(update={"revoked": 1_800_000_000})
            client.hset(KEYS, ended_record.id, ended_record.model_dump_json())
            client.hset(former_overrides.KEY, "10.0.0.9:8001", '{"drain": true}')
        settings = {"database_url": postgresql_url, "redis_url": redis.url}
        assert run("upgrade", **settings).code == 0
        head = f"state folder: {tmp_path}; GATEWAY_REDIS_URL: read\n"
        text = "keys: {} copied, {} were there already\noverrides of replicas: {} copied\n"
        would = head + text.replace("copied", "would be copied").format(2, 0, 1)
        for _ in range(2):
            assert run("import", "--dry-run", **settings) == (0, would, "")
        assert run("import", **settings) == (0, head + text.format(2, 0, 1), "")
        assert run("import", **settings) == (0, head + text.format(0, 2, 0), "")


def test_sqlite_has_its_tables(run: Run, tmp_path: Path) -> None:
    record, _ = make_record("acme", "", None, "sha256:" + "a" * 8)
    _write_keys(tmp_path, record.model_dump())
    text = f"state folder: {tmp_path}; GATEWAY_REDIS_URL: not set\nkeys: 1 "
    assert run("import", "--dry-run").stdout.startswith(text + "would be copied")
    assert not (tmp_path / "@database").exists()
    assert run("import").stdout.startswith(text + "copied")
    with closing(sqlite3.connect(tmp_path / "@database" / "gateway.sqlite")) as connection:
        assert connection.execute("SELECT id FROM api_keys").fetchall() == [(record.id,)]


def test_what_cannot_be_imported_is_named(run: Run, tmp_path: Path) -> None:
    record, _ = make_record("acme", "", None, "sha256:" + "a" * 8)
    wrong, _ = make_record("acme", "", None, "sha256:" + "a" * 8)
    _write_keys(tmp_path, record.model_dump(), wrong.model_dump() | {"created": -1})
    for arguments in (["--dry-run"], []):
        ended = run("import", *arguments)
        assert ended.code == 1
        assert "\nkeys: 1 " in ended.stdout
        file = tmp_path / "@keys" / "keys.json"
        assert ended.stderr == f"not copied: {file}: 1 fields of a key are invalid\n"
        assert wrong.hash[:20] not in ended.stderr


def test_a_redis_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "redis.conf"
    config.write_text("requirepass right\n")
    with running_redis(config) as redis:
        for url in (f"{redis.url}?password={SECRET}", f"{redis.url}.none"):
            _assert_not_read(run("import", redis_url=url), redis)


def _assert_not_read(ended: Ended, redis: RedisServer) -> None:
    assert (ended.code, ended.stdout) == (1, "")
    assert ended.stderr.startswith(
        "gateway database: state of the release before cannot be read: Redis: "
    )
    assert SECRET not in ended.stderr
    assert redis.url not in ended.stderr


def _write_keys(folder: Path, *records: object) -> None:
    (folder / "@keys").mkdir()
    (folder / "@keys" / "keys.json").write_text(json.dumps(records))
