"""PostgreSQL of the Compose file, replaced by another major release: docs/compose-database.md."""

from __future__ import annotations

import subprocess

import pytest

from tests.containers.compose import Project, project
from tests.containers.engine import Engine
from tests.containers.images import STAND_INS

OLD, NEW = STAND_INS["postgres-15"], STAND_INS["postgres"]
PG_DUMP = ("pg_dump", "--username", "postgres", "--clean", "--if-exists")
PSQL = ("psql", "--username", "postgres", "--quiet", "--tuples-only", "--set", "ON_ERROR_STOP=1")


def test_another_major_release_needs_a_dump_and_loses_nothing(engine: Engine) -> None:
    with project(engine, "major", COMPOSE_PROFILES="gpu", POSTGRES_IMAGE=OLD) as compose:
        assert "migrations run: 0001" in _upgrade(compose)
        identity = _identity(compose)

        # The image alone: the new release refuses to start beside the old one's data.
        compose.set(POSTGRES_IMAGE=NEW)
        with pytest.raises(subprocess.CalledProcessError):
            compose.up("postgres")
        assert "there appears to be PostgreSQL data of another release" in compose(
            "logs", "postgres"
        )
        compose.set(POSTGRES_IMAGE=OLD)
        assert "migrations run: none" in _upgrade(compose)
        assert _identity(compose) == identity

        dump = compose.exec("postgres", *PG_DUMP, "gateway")
        assert "PostgreSQL database dump complete" in dump
        compose("down")
        engine.docker("volume", "rm", compose.named("postgres"))
        compose.set(POSTGRES_IMAGE=NEW)
        compose.up("postgres")
        for _ in range(2):  # into the empty database, and over its tables
            compose.exec("postgres", *PSQL, "--single-transaction", "gateway", stdin=dump)
            assert "migrations run: none" in _upgrade(compose)
            assert _identity(compose) == identity


def _upgrade(compose: Project) -> str:
    return compose("run", "--rm", "--no-TTY", "database-upgrade")


def _identity(compose: Project) -> str:
    read = "SELECT value FROM facts WHERE name = 'identity'"
    found = compose.exec("postgres", *PSQL, "--command", read, "gateway").strip()
    assert found
    return found
