"""The Compose profile `gpu`: tasks, network access, rights and persistent data."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.containers.compose import API, Project, assert_without_rights, completion, reaches
from tests.containers.engine import Engine
from tests.containers.gpu import Deployment, bearer
from tests.support.patience import PATIENCE_S

CAPITAL = "The capital of France is"
Up = tuple[Deployment, Project]


@pytest.fixture(scope="module")
def up(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    deployment = Deployment(tmp_path_factory.mktemp("gpu"))
    with deployment.up(engine, "gpu") as compose:
        yield deployment, compose


def test_tenants_are_answered(up: Up) -> None:
    deployment, _ = up
    assert httpx.get(f"{API}/v1/models", timeout=PATIENCE_S).status_code == 401
    assert completion("demo", CAPITAL, headers=bearer(deployment.acme)).strip() == "Paris."
    added = deployment.add_adapter("zh", "zh")
    assert added.status_code == 201, added.text
    assert completion("zh", CAPITAL, headers=bearer(deployment.acme)) == "巴黎"
    # Admin routes are on a separate port.
    assert deployment.add_adapter("ja", "ja", url=API).status_code == 404


def test_down_and_up_again_keeps_adapters_keys_and_limits(up: Up) -> None:
    deployment, compose = up
    added = deployment.add_adapter("ja", "ja")
    assert added.status_code == 201, added.text
    key = deployment.make_key().json()["value"]
    for _ in range(3):  # until the daily token budget is used up
        last = _asked(deployment.small)
    assert (last.status_code, last.json()["error"]["code"]) == (429, "insufficient_quota")

    compose("down")
    compose.up()
    assert completion("ja", CAPITAL, headers=bearer(key)) == "パリ"
    again = _asked(deployment.small)
    assert (again.status_code, again.json()["error"]["code"]) == (429, "insufficient_quota")


def test_services_get_new_keys(up: Up, engine: Engine) -> None:
    """Remove the volumes with the services' keys, as deploy/compose/make-keys.sh says."""
    deployment, compose = up
    key = deployment.make_key().json()["value"]
    before = compose.exec("postgres", "cat", "/run/secrets/password")
    compose("down")
    volumes = (f"keys-{service}" for service in ("gateway", "postgres", "redis", "triton"))
    engine.docker("volume", "rm", *(compose.named(volume) for volume in volumes))
    compose.up()
    assert compose.exec("postgres", "cat", "/run/secrets/password") != before
    assert completion("demo", CAPITAL, headers=bearer(key)).strip() == "Paris."
    assert deployment.make_key().status_code == 201


def _asked(key: str) -> httpx.Response:
    asked = {"model": "demo", "prompt": CAPITAL, "max_tokens": 20, "ignore_eos": True}
    return httpx.post(f"{API}/v1/completions", json=asked, headers=bearer(key), timeout=PATIENCE_S)


def test_nothing_has_rights(up: Up) -> None:
    _, compose = up
    assert_without_rights(compose, "gateway", user="10001")
    assert_without_rights(compose, "redis", user="999")
    assert_without_rights(compose, "postgres", user="999")
    assert_without_rights(compose, "triton", user="1000", read_only=False)
    # The `keys` container runs as root once to write key volumes, without capabilities or network.
    keys, upgrade = (compose.container(name) for name in ("keys", "database-upgrade"))
    assert keys["HostConfig"]["NetworkMode"] == "none"
    for once in (keys, upgrade):
        assert once["State"]["ExitCode"] == 0
        assert once["HostConfig"]["CapDrop"] == ["ALL"]
    assert upgrade["Config"]["User"] == "10001:10001"
    # It has written nothing but tables.
    assert {mount["Destination"] for mount in upgrade["Mounts"]} == {"/run/secrets"}


def test_backends_are_reached_from_nowhere_else(up: Up, engine: Engine) -> None:
    _, compose = up
    redis, postgres, triton = (
        compose.address(service, "engine") for service in ("redis", "postgres", "triton")
    )
    for target in [
        *((redis, 6379), (postgres, 5432)),
        *((triton, 8000), (triton, 8001), (triton, 8002)),
    ]:
        assert reaches(engine, compose.named("engine"), *target), target
        assert not reaches(engine, compose.named("edge"), *target), target
    assert reaches(engine, compose.named("edge"), "gateway", 9000)
    # Only the API's two ports are published, and only on localhost.
    published = {
        service: compose.container(service)["HostConfig"]["PortBindings"] or {}
        for service in ("gateway", "redis", "postgres", "triton")
    }
    assert published == {
        "gateway": {
            "9000/tcp": [{"HostIp": "127.0.0.1", "HostPort": "9000"}],
            "9001/tcp": [{"HostIp": "127.0.0.1", "HostPort": "9001"}],
        },
        "redis": {},
        "postgres": {},
        "triton": {},
    }


def test_keys_are_seen_by_those_who_need_them(up: Up) -> None:
    _, compose = up
    keys = [
        compose.exec("redis", "cat", "/run/secrets/password"),
        compose.exec("postgres", "cat", "/run/secrets/password"),
        compose.exec("triton", "cat", "/run/secrets/triton/key"),
    ]
    assert [len(key) for key in keys] == [64, 64, 64]
    assert len(set(keys)) == 3
    own = compose.exec("gateway", "sh", "-c", "cat /run/secrets/*")
    assert [key for key in keys if key not in own] == []
    logs = compose("logs", "postgres", "database-upgrade")
    for service in ("gateway", "redis", "postgres", "database-upgrade", "triton"):
        known = str(compose.container(service)["Config"])
        assert [key for key in keys if key in known or key in logs] == [], service
    unknown = compose.exec("redis", "redis-cli", "get", "anything")
    assert unknown.startswith("NOAUTH")


def test_postgresql_wants_the_password_of_a_role_without_rights(up: Up) -> None:
    _, compose = up
    psql = "psql --no-password --tuples-only --no-align"
    for role in ("gateway", "postgres"):
        login = f'"host=$(hostname) user={role} dbname=gateway"'
        refused = compose.exec("postgres", "sh", "-c", f"{psql} {login} 2>&1 || true")
        assert "no password supplied" in refused, role
    roles = "SELECT rolname, rolsuper, rolpassword IS NULL FROM pg_authid WHERE rolcanlogin"
    found = compose.exec("postgres", *psql.split(), "--username", "postgres", "--command", roles)
    assert sorted(found.split()) == ["gateway|f|f", "postgres|t|t"]


def test_each_stops_within_its_grace_period(up: Up) -> None:
    """Check that no container is killed at the end of its grace period (exit code 137)."""
    _, compose = up
    compose("stop")
    codes = {
        service: compose.container(service)["State"]["ExitCode"]
        for service in ("gateway", "redis", "postgres", "triton")
    }
    assert set(codes.values()) == {0}, codes
    compose.up()
