"""docker-compose.yml and .env, checked against the Compose schema and against each other."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import redis
import yaml

from gateway.config.file import load
from gateway.config.settings import Settings
from ops.deployment.launch import Launch, command
from tests.support.postgresql_server import (
    VERSIONS,
    PostgresqlServer,
    available,
    running_postgresql,
    why_missing,
)
from tests.support.redis_server import running_redis
from tests.support.upgraded_database import upgrade_database

TREE = Path(__file__).parents[2]
COMPOSE = TREE / "docker-compose.yml"
TEXT = COMPOSE.read_text(encoding="utf-8")
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
OURS = ("gateway", "demo")
HARDENED = (
    *("keys", "redis", "postgres", "database-upgrade", "gateway", "demo", "prometheus", "grafana"),
)


def _variables() -> dict[str, str]:
    """Return the variables of .env. Each must follow a comment that describes it."""
    found: dict[str, str] = {}
    before = ""
    for line in (TREE / ".env").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.partition("=")
            assert before.startswith("#"), f"{name} is not described"
            found[name] = value
        before = line
    return found


def test_the_schema_accepts_it() -> None:
    checker = [Path(sys.executable).parent / "check-jsonschema"]
    arguments = ["--builtin-schema", "vendor.compose-spec", COMPOSE]
    done = subprocess.run([*checker, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_variable_is_described_and_used() -> None:
    used = set(re.findall(r"\$\{(\w+)", TEXT))
    passed = {
        name
        for service in SERVICES.values()
        for name, value in service.get("environment", {}).items()
        if value is None
    }
    assert used | passed | {"COMPOSE_PROFILES"} == set(_variables())


def test_defaults_agree() -> None:
    variables = _variables()
    for name, default in re.findall(r"\$\{(\w+):-([^}]*)\}", TEXT):
        assert variables[name] == default


def test_settings_of_the_gateway_exist() -> None:
    known = {f"GATEWAY_{name.upper()}" for name in Settings.model_fields}
    assert set(SERVICES["gateway"]["environment"]) <= known


def test_nobody_is_let_in_without_a_key_until_somebody_says_so() -> None:
    assert _variables()["GATEWAY_ALLOW_ANONYMOUS"] == ""
    assert SERVICES["gateway"]["environment"]["GATEWAY_ALLOW_ANONYMOUS"] is None


def test_nothing_secret_is_in_it() -> None:
    assert _variables()["GATEWAY_ADMIN_KEY"] == ""
    assert not re.search(r"(?i)password|secret", "".join(_variables()))


def test_profiles_keep_the_demo_away_from_gpus() -> None:
    assert {name: service["profiles"] for name, service in SERVICES.items()} == {
        "keys": ["gpu"],
        "triton": ["gpu"],
        "redis": ["gpu"],
        "postgres": ["gpu"],
        "database-upgrade": ["gpu"],
        "gateway": ["gpu"],
        "demo": ["cpu"],
        "prometheus": ["monitoring"],
        "grafana": ["monitoring"],
    }
    needs_gpu = [name for name, service in SERVICES.items() if "deploy" in service]
    assert needs_gpu == ["triton"]


@pytest.mark.parametrize("name", HARDENED)
def test_containers_have_no_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_triton_has_neither_root_nor_rights() -> None:
    service = SERVICES["triton"]
    assert _variables()["TRITON_USER"] == "1000:1000"
    assert service["user"] == "${TRITON_USER:-1000:1000}"
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_every_image_can_be_named_by_digest() -> None:
    for name, service in SERVICES.items():
        assert re.fullmatch(r"\$\{\w+_IMAGE:-[^}]+\}", service["image"]), name
    assert "FROM python" not in (TREE / "Dockerfile").read_text(encoding="utf-8")


def test_keys_are_drawn_once_and_open_what_they_lock(tmp_path: Path) -> None:
    """Run the script of the first start twice, and then a real Redis with its keys."""
    first = _make_keys(tmp_path)
    assert _make_keys(tmp_path) == first
    password, key = first["redis/password"], first["triton/key"]
    database = first["postgres/password"]
    assert all(re.fullmatch("[0-9a-f]{64}", text) for text in (password, key, database))
    assert len({password, key, database}) == 3
    settings = Settings(tokenizer_dir=tmp_path, _secrets_dir=tmp_path / "gateway")
    assert settings.database_url is not None
    url = settings.database_url.get_secret_value()
    assert url == f"postgresql://gateway:{database}@postgres:5432/gateway"
    metadata = {name: value.get_secret_value() for name, value in settings.triton_metadata.items()}
    assert metadata == {"triton-grpc-protocol-gateway": key}
    assert settings.redis_url == f"redis://:{password}@redis:6379/0"
    with running_redis(tmp_path / "redis" / "redis.conf") as server:
        with server.client() as stranger, pytest.raises(redis.AuthenticationError):
            stranger.ping()
        with server.client(password=password) as known:
            assert known.ping()
    # An interrupted first start draws all keys again.
    for name in ("triton_metadata", "database_url"):
        (tmp_path / f"gateway/gateway_{name}").unlink()
    assert set(_make_keys(tmp_path).values()).isdisjoint(first.values())


@pytest.mark.parametrize("missing", [("postgres", "gateway"), ("postgres",)])
def test_postgresql_gets_a_password_and_other_keys_stay(
    tmp_path: Path, missing: tuple[str, ...]
) -> None:
    """Run the script with the volumes of the release before, and without keys-postgres."""
    first = _make_keys(tmp_path)
    of_postgres = {"postgres": "password", "gateway": "gateway_database_url"}
    for volume in missing:
        (tmp_path / volume / of_postgres[volume]).unlink()
    again = _make_keys(tmp_path)
    changed = {name for name in first if again[name] != first[name]}
    assert changed == {f"{volume}/{name}" for volume, name in of_postgres.items()}


def _make_keys(folder: Path) -> dict[str, str]:
    """Run make-keys.sh with volumes in `folder`. Return the contents of the files by name."""
    text = (TREE / "deploy/compose/make-keys.sh").read_text(encoding="utf-8")
    for name in set(re.findall(r"/keys/(\w+)/", text)):
        (folder / name).mkdir(exist_ok=True)
    subprocess.run(["sh", "-c", text.replace("/keys/", f"{folder}/")], check=True)
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in files}


async def test_postgresql_has_the_password_of_the_keys_after_each_start() -> None:
    """Run postgres.sh twice, with another password each, on the state that the image prepares."""
    if not available():
        pytest.skip(why_missing(VERSIONS[0]))
    with running_postgresql() as server:
        server.execute("ALTER DATABASE gateway OWNER TO postgres; DROP ROLE gateway")
        for server.password in ("1" * 64, "2" * 64):
            server.stop()
            _run_postgres_script(server)
            server.start()
            upgrade_database(server.database_url("gateway"))
        connection = await asyncpg.connect(server.database_url("gateway"))
        is_superuser = "SELECT rolsuper FROM pg_roles WHERE rolname = current_user"
        assert await connection.fetchval(is_superuser) is False
        await connection.close()
        with pytest.raises(AssertionError, match='authentication failed for user "postgres"'):
            server.execute("SELECT 1")
        assert server.password not in server.log.read_text(encoding="utf-8")


def _run_postgres_script(server: PostgresqlServer) -> None:
    """Run postgres.sh as the server's user, without the image's scripts that it calls."""
    folder = server.log.parent
    for name in ("docker-ensure-initdb.sh", "docker-entrypoint.sh"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    (folder / "password").write_text(server.password)
    text = (TREE / "deploy/compose/postgres.sh").read_text(encoding="utf-8")
    text = text.replace("/run/secrets/", f"{folder}/")
    path = os.pathsep.join([str(folder), str(server._binaries), os.defpath])
    env = {**server._popen["env"], "PATH": path, "PGDATA": str(server._data)}
    with server.log.open("ab") as log:
        subprocess.run(["sh", "-c", text], **{**server._popen, "env": env}, stderr=log, check=True)


def test_only_loopback_is_published_and_only_of_the_gateway() -> None:
    variables = _variables()
    for name, service in SERVICES.items():
        for port in service.get("ports", []):
            published = re.match(r"\$\{(\w+)", port)
            assert published is not None
            assert variables[published[1]].startswith("127.0.0.1:"), name
    assert {name for name in SERVICES if "ports" in SERVICES[name]} == {
        "gateway",
        "demo",
        "grafana",
    }
    assert yaml.safe_load(TEXT)["networks"]["engine"] == {"internal": True}


def test_streams_have_time_to_finish() -> None:
    gateway = SERVICES["gateway"]
    grace = float(gateway["environment"]["GATEWAY_SHUTDOWN_GRACE"])
    assert float(gateway["stop_grace_period"].removesuffix("s")) > grace
    # Triton waits up to 30 seconds for its running requests.
    assert float(SERVICES["triton"]["stop_grace_period"].removesuffix("s")) > 30


def test_tables_are_upgraded_by_the_image_of_the_gateway_before_it_starts() -> None:
    gateway, upgrade = SERVICES["gateway"], SERVICES["database-upgrade"]
    assert [gateway[key] for key in ("image", "build")] == [
        upgrade[key] for key in ("image", "build")
    ]
    assert upgrade["command"] == ["database", "upgrade"]
    assert upgrade["restart"] == "no"
    assert upgrade["depends_on"]["postgres"] == {"condition": "service_healthy"}
    completed = {"condition": "service_completed_successfully"}
    assert gateway["depends_on"]["database-upgrade"] == completed
    assert "keys-gateway:/run/secrets:ro" in upgrade["volumes"]


def test_postgresql_refuses_the_data_of_another_major_release() -> None:
    """Check that the image is one that looks for such data, and that its folder is not changed."""
    image = _variables()["POSTGRES_IMAGE"]
    assert int(re.fullmatch(r"postgres:(\d+)-bookworm", image)[1]) >= 18  # type: ignore[index]
    assert "postgres:/var/lib/postgresql" in SERVICES["postgres"]["volumes"]
    assert "PGDATA" not in SERVICES["postgres"]["environment"]


def test_redis_keeps_records_and_drops_versions() -> None:
    text = " ".join(SERVICES["redis"]["command"])
    assert "--maxmemory-policy volatile-lru" in text
    assert "--appendonly yes" in text
    assert int(_variables()["GATEWAY_REDIS_TTL"]) > 0  # volatile-lru evicts only keys with a TTL


def test_triton_starts_as_the_launcher_starts_it() -> None:
    launch = Launch(model_repo="/models/repository", tritonserver="/launch/tritonserver.sh")
    composed = ["/launch/mpirun.sh", *command(launch)[1:]]
    assert shlex.split(_variables()["TRITON_COMMAND"]) == composed


def test_mounted_folders_exist() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).partition(":")[0]
            if source.startswith("./") and source != "./models":
                assert (TREE / source).exists(), name


def test_images_are_built_from_targets_that_exist() -> None:
    text = (TREE / "Dockerfile").read_text(encoding="utf-8")
    for name in OURS:
        assert re.search(rf"^FROM \S+ AS {SERVICES[name]['build']['target']}$", text, re.MULTILINE)


def test_the_example_of_tenants_is_valid() -> None:
    configuration, _ = load(TREE / "deploy/gateway/tenants.example.yaml")
    assert configuration.tenants is not None
