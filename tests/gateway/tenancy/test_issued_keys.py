"""API keys made over the API: gateways that share PostgreSQL, and gateways with SQLite."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gateway.config.tenants import key_hash, new_key
from gateway.database.sharing import DATABASES
from gateway.former_state.keys import KEYS
from gateway.tenancy.keys.record import make_record
from ops.commands.up import DEMO_MODEL
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.metrics import sample
from tests.support.patience import PATIENCE_S
from tests.support.postgresql_server import PostgresqlServer, available, running_postgresql
from tests.support.redis_server import RedisServer, running_redis
from tests.support.refused_start import refusals
from tests.support.upgraded_database import upgrade_database, write_sqlite

OF_THE_FILE, ADMIN = "sk-the-key-of-acme", new_key()
ACME, OTHER = tenant("acme", OF_THE_FILE), tenant("other", "sk-the-key-of-other")
UNAVAILABLE = "database_unavailable"
APART = "gateways with databases of their own share this Redis"
NEWEST = "UPDATE facts SET value = '9999' WHERE name IN ('schema', 'readable_from')"
TRIES = 6  # new connections, so that both workers are likely to get one


@dataclass
class Pair:
    """Two gateways with separate disks, one PostgreSQL and one Redis. The second has two workers.

    PostgreSQL is durable, so that it has all commits after a kill.
    """

    postgresql: PostgresqlServer
    redis: RedisServer
    config: Path
    one: GatewayProcess
    two: GatewayProcess


@pytest.fixture(scope="module")
def pair(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if not available():
        pytest.skip("PostgreSQL is not installed: make setup")
    folder = tmp_path_factory.mktemp("keys")
    config = write_config(folder / "c.yaml", ACME, OTHER)
    with ExitStack() as running:
        postgresql = running.enter_context(running_postgresql(durable=True))
        upgrade_database(postgresql.url)
        redis = running.enter_context(running_redis())
        settings = {"config": config, "admin_key": ADMIN, "redis_url": redis.url}
        settings["database_url"] = postgresql.url
        one = GatewayProcess(folder / "one", stack, **settings)
        two = GatewayProcess(folder / "two", stack, workers=2, **settings)
        running.enter_context(one)
        running.enter_context(two)
        yield Pair(postgresql, redis, config, one, two)
        assert postgresql.password not in one.text + two.text


def _keys(
    gateway: GatewayProcess, method: str, path: str = "", key: str = ADMIN, **body: Any
) -> httpx.Response:
    with gateway.client(key) as client:
        return client.request(method, f"/v1/keys{path}", **({"json": body} if body else {}))


def _done(gateway: GatewayProcess, method: str, path: str = "", **body: Any) -> httpx.Response:
    """Call `_keys` again while the database is too slow, which the gateway answers with 503."""
    deadline = time.monotonic() + PATIENCE_S
    while (answer := _keys(gateway, method, path, **body)).status_code == 503:
        assert time.monotonic() < deadline, answer.text
    return answer


def _new(gateway: GatewayProcess, **body: Any) -> dict[str, Any]:
    answer = _done(gateway, "POST", tenant="acme", **body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def _listed(gateway: GatewayProcess) -> dict[str, dict[str, Any]]:
    return {key["id"]: key for key in _done(gateway, "GET").json()["data"]}


def _error(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def _statuses(gateway: GatewayProcess, key: str) -> set[int]:
    return {_status(gateway, key) for _ in range(TRIES)}


def _status(gateway: GatewayProcess, key: str) -> int:
    """Return the status of a request on a new connection.

    httpx would load all of the machine's CA certificates for each connection.
    """
    with closing(HTTPConnection("127.0.0.1", gateway.port, timeout=60)) as connection:
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
        return connection.getresponse().status


def _until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _becomes(gateway: GatewayProcess, key: str, status: int) -> None:
    _until(lambda: _statuses(gateway, key) == {status})


def _troubles(gateway: GatewayProcess) -> str:
    with gateway.client(ADMIN) as client:
        answer = client.get("/health/ready")
    assert answer.status_code == 200, answer.text
    return " ".join(trouble["text"] for trouble in answer.json().get("troubles", ()))


def _metric(gateway: GatewayProcess, name: str) -> float:
    with gateway.client(ADMIN) as client:
        return sample(client.get("/metrics").text, name)


def test_a_key_is_shown_once_and_works_everywhere_until_it_is_deleted(pair: Pair) -> None:
    old, new = _new(pair.one, note="the laptop 💻"), _new(pair.two)
    assert (old["object"], old["tenant"], old["expires_at"]) == ("key", "acme", None)
    assert old["created_by"] == key_hash(ADMIN)[:15]
    assert _statuses(pair.one, old["value"]) == {200}
    # A rotation needs both keys at once: the old key is deleted after all clients have the new one.
    for gateway in (pair.one, pair.two):
        for made in (old, new):
            _becomes(gateway, made["value"], 200)
        _until(lambda: old["id"] in _listed(gateway))  # noqa: B023
    listed = _listed(pair.one)[old["id"]]
    assert listed["note"] == "the laptop 💻"
    assert "value" not in listed
    answer = _done(pair.two, "DELETE", f"/{old['id']}")
    assert answer.json() == {"id": old["id"], "object": "key", "deleted": True}
    for gateway in (pair.one, pair.two):
        _becomes(gateway, old["value"], 401)
        _until(lambda: old["id"] not in _listed(gateway))  # noqa: B023
        assert _statuses(gateway, new["value"]) == {200}
    assert _done(pair.one, "DELETE", f"/{old['id']}").status_code == 200
    assert _done(pair.one, "DELETE", "/key_" + "0" * 24).json()["error"]["code"] == "key_not_found"
    audited = [line for line in pair.two.text.splitlines() if "gateway.audit" in line]
    assert f"keys.create '{new['id']}': done, before null, after" in "".join(audited)
    assert f"keys.delete '{old['id']}': done, before" in "".join(audited)
    stored = _stored(pair)
    assert key_hash(old["value"]) in stored
    for made in (old, new):
        assert made["value"] not in pair.one.text + pair.two.text + stored


def _stored(pair: Pair) -> str:
    """Return all rows of the database, and assert that Redis has none of the keys."""
    with pair.redis.client() as client:
        assert not client.exists(KEYS)
    names = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'public'"
    tables = pair.postgresql.execute(names, "gateway").split()
    assert {"api_keys", "audit_log"} <= set(tables)
    rows = "SET bytea_output = escape; " + "; ".join(f"SELECT * FROM {name}" for name in tables)
    return pair.postgresql.execute(rows, "gateway")


def test_only_admins_and_only_for_tenants_of_the_file(pair: Pair) -> None:
    made = _new(pair.one)
    for key in (OF_THE_FILE, made["value"], "sk-guess"):
        for method, path in (("GET", ""), ("POST", ""), ("DELETE", f"/{made['id']}")):
            assert _keys(pair.one, method, path, key).status_code == 401
    answer = _keys(pair.one, "POST", tenant="nobody")
    assert answer.json()["error"] == {
        "message": "tenant: found 'nobody'; allowed: acme, other",
        "type": "invalid_request_error",
        "param": "tenant",
        "code": None,
    }
    for wrong in ({"note": "a\nb"}, {"note": "x" * 257}, {"expires_in": 0}, {"admin": True}):
        assert _keys(pair.one, "POST", tenant="acme", **wrong).status_code == 400
    # A key is refused while its tenant is not in the file, and works again once the tenant is back.
    write_config(pair.config, OTHER)
    for gateway in (pair.one, pair.two):
        _becomes(gateway, made["value"], 401)
    write_config(pair.config, ACME, OTHER)
    for gateway in (pair.one, pair.two):
        _becomes(gateway, made["value"], 200)


def test_an_expired_key_is_refused(pair: Pair) -> None:
    made = _new(pair.one, expires_in=2)
    assert made["expires_at"] == made["created_at"] + 2
    _until(lambda: time.time() >= made["expires_at"])
    with pair.one.client(made["value"]) as client:
        answer = client.get("/v1/models")
    assert _error(answer) == (401, "invalid_api_key")
    assert "expired" in answer.json()["error"]["message"]


def test_the_command(pair: Pair) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ops", "key", *arguments, "--url", pair.one.url]
        env = os.environ | {"GATEWAY_ADMIN_KEY": ADMIN}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env)

    made = run("new", "--tenant", "acme", "--note", "nightly jobs", "--expires-in", "90d")
    key, key_id = made.stdout.splitlines()
    assert _statuses(pair.one, key) == {200}
    listed = _listed(pair.one)[key_id]
    assert listed["expires_at"] == listed["created_at"] + 90 * 24 * 3600
    line = next(line for line in run("list").stdout.splitlines() if line.startswith(key_id))
    assert line.split("\t")[1::4] == ["acme", "nightly jobs"]
    assert (run("revoke", key_id).returncode, _statuses(pair.one, key)) == (0, {401})
    refused = run("new", "--tenant", "nobody")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "gateway key: tenant: found 'nobody'; allowed: acme, other\n"


def test_without_the_database_keys_stay_as_they_are(pair: Pair) -> None:
    kept, gone, lost = _new(pair.one), _new(pair.one), _new(pair.one)
    for made in (kept, gone, lost):
        _becomes(pair.two, made["value"], 200)
    assert _done(pair.one, "DELETE", f"/{lost['id']}").status_code == 200
    _becomes(pair.two, lost["value"], 401)
    assert _metric(pair.one, "gateway_database_up") == 1
    pair.postgresql.kill()
    try:
        for gateway in (pair.one, pair.two):
            refused = _keys(gateway, "POST", tenant="acme")
            assert _error(refused) == (503, UNAVAILABLE)
            assert int(refused.headers["retry-after"]) >= 1
        # The gateway that gets the request ends the key, and says that other gateways may not have.
        refused = _keys(pair.one, "DELETE", f"/{gone['id']}")
        assert _error(refused) == (503, UNAVAILABLE)
        assert "The key is revoked in the process" in refused.json()["error"]["message"]
        assert re.search(
            rf"keys.delete '{gone['id']}': DatabaseUnavailable, before {{.*}}, after null",
            pair.one.text,
        )
        for made, one, two in ((kept, 200, 200), (lost, 401, 401), (gone, 401, 200)):
            assert _statuses(pair.one, made["value"]) == {one}
            assert _statuses(pair.two, made["value"]) == {two}
        answer = _keys(pair.one, "GET")
        assert answer.status_code == 200
        assert {made["id"] for made in answer.json()["data"]} & {
            made["id"] for made in (kept, gone, lost)
        } == {kept["id"]}
        with pair.two.client(kept["value"]) as client:
            assert client.post("/v1/completions", json=body()).status_code == 200
        _until(lambda: "the database fails" in _troubles(pair.one))
        assert _metric(pair.one, "gateway_database_up") == 0
        assert _metric(pair.one, "gateway_database_failures_total") > 0
    finally:
        pair.postgresql.start()
    for gateway in (pair.one, pair.two):
        for made, status in ((gone, 401), (lost, 401), (kept, 200)):
            _becomes(gateway, made["value"], status)
        _until(lambda: not {gone["id"], lost["id"]} & _listed(gateway).keys())  # noqa: B023
        assert kept["id"] in _listed(gateway)
    _until(lambda: "the database fails" not in _troubles(pair.one))
    assert _statuses(pair.one, _new(pair.one)["value"]) == {200}


def test_a_gateway_that_starts_without_the_database_accepts_keys_once_it_is_back(
    pair: Pair,
) -> None:
    made, ended = _new(pair.one), _new(pair.one)
    assert _done(pair.one, "DELETE", f"/{ended['id']}").status_code == 200
    pair.one.__exit__(None, None, None)
    pair.postgresql.kill()
    try:
        pair.one.__enter__()
        # A key that this gateway has not read may be valid, so it is neither accepted nor refused.
        for key in (made["value"], ended["value"], "sk-guess"):
            assert _statuses(pair.one, key) == {503}
        with pair.one.client(made["value"]) as client:
            answer = client.post("/v1/completions", json=body())
        assert _error(answer) == (503, UNAVAILABLE)
        for method in ("GET", "POST"):
            assert _keys(pair.one, method, **_WANTED[method]).status_code == 503
        with pair.one.client(OF_THE_FILE) as client:
            assert client.post("/v1/completions", json=body()).status_code == 200
        answer = httpx.get(f"{pair.one.url}/v1/models", timeout=PATIENCE_S)
        assert _error(answer) == (401, "invalid_api_key")
    finally:
        pair.postgresql.start()
    for key, status in ((made["value"], 200), (ended["value"], 401), ("sk-guess", 401)):
        _becomes(pair.one, key, status)
    assert made["id"] in _listed(pair.one)


_WANTED: dict[str, dict[str, str]] = {"GET": {}, "POST": {"tenant": "acme"}}


def test_a_gateway_alone_has_its_disk(stack: Stack, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", ACME)
    gateway = GatewayProcess(tmp_path / "g", stack, config=config, admin_key=ADMIN)
    with gateway:
        used, gone = _new(gateway), _new(gateway)
        assert _statuses(gateway, used["value"]) == {200}
        assert used["created_at"] - 60 < _listed(gateway)[used["id"]]["last_used_at"]
        assert _listed(gateway)[gone["id"]]["last_used_at"] is None
        assert _done(gateway, "DELETE", f"/{gone['id']}").status_code == 200
    with gateway:
        assert _statuses(gateway, used["value"]) == {200}
        assert _statuses(gateway, gone["value"]) == _statuses(gateway, "sk-guess") == {401}
        assert _listed(gateway)[used["id"]]["last_used_at"] % 60 == 0


@pytest.mark.usefixtures("at_shared_redis")
def test_workers_of_a_gateway_share_its_disk(
    stack: Stack, shared_redis: RedisServer, tmp_path: Path
) -> None:
    config = write_config(tmp_path / "c.yaml", ACME)
    settings = {"config": config, "admin_key": ADMIN, "redis_url": shared_redis.url, "workers": 2}
    with GatewayProcess(tmp_path / "g", stack, **settings) as gateway:
        made, gone = _new(gateway), _new(gateway)
        for key in (made, gone):
            _becomes(gateway, key["value"], 200)
        assert _done(gateway, "DELETE", f"/{gone['id']}").status_code == 200
        _becomes(gateway, gone["value"], 401)
        workers = psutil.Process(gateway.process.pid).children()
        for worker in workers:
            worker.kill()
        psutil.wait_procs(workers)
        # The successors read the keys from the disk.
        _becomes(gateway, made["value"], 200)
        _becomes(gateway, gone["value"], 401)
        assert _listed(gateway).keys() == {made["id"]}
        assert "databases of their own" not in gateway.text


@pytest.mark.usefixtures("at_shared_redis")
def test_gateways_with_databases_of_their_own_make_no_keys(
    stack: Stack, shared_redis: RedisServer, tmp_path: Path
) -> None:
    """Keys that Redis has from the release before are valid everywhere."""
    config = write_config(tmp_path / "c.yaml", ACME)
    record, key = make_record("acme", "", None, key_hash(ADMIN)[:15])
    with shared_redis.client() as client:
        client.hset(KEYS, record.id, record.model_dump_json())
    settings = {"config": config, "admin_key": ADMIN, "redis_url": shared_redis.url}
    one, two = (GatewayProcess(tmp_path / name, stack, **settings) for name in ("one", "two"))
    with one:
        made = _new(one)
        with two:
            for gateway in (one, two):
                _until(lambda: _keys(gateway, "POST", tenant="acme").status_code == 403)  # noqa: B023
                refused = _keys(gateway, "POST", tenant="acme").json()["error"]["message"]
                assert refused.startswith("Creating keys needs a database that all gateways share")
                assert "GATEWAY_DATABASE_URL" in refused
                assert _statuses(gateway, key) == {200}
            assert (_status(one, made["value"]), _status(two, made["value"])) == (200, 401)
            answer = _keys(one, "DELETE", f"/{record.id}")
            assert answer.status_code == 403
            message = answer.json()["error"]["message"]
            assert message.startswith("The key is revoked at this gateway only.")
            assert "GATEWAY_DATABASE_URL" in message
            assert (_statuses(one, key), _statuses(two, key)) == ({401}, {200})
            _until(lambda: APART in _troubles(one))
            _register_again(shared_redis)
            assert one.text.count(APART) == 1, "the trouble came and went"
        with shared_redis.client() as client:
            # As if the other gateway had ended long ago.
            client.zadd(DATABASES, dict.fromkeys(client.zrange(DATABASES, 0, -1), 0))
        _until(lambda: _keys(one, "POST", tenant="acme").status_code == 201)
        _until(lambda: APART not in _troubles(one))
    # Redis still has the key, which is not valid again after it was revoked.
    with one:
        assert (_statuses(one, key), _statuses(one, made["value"])) == ({401}, {200})


def _register_again(redis: RedisServer) -> None:
    """Wait until each gateway has registered its database twice more."""
    with redis.client() as client:
        for _ in range(2):
            before: dict[bytes, float] = dict(client.zrange(DATABASES, 0, -1, withscores=True))
            _until(
                lambda: all(client.zscore(DATABASES, name) > at for name, at in before.items())  # noqa: B023
            )


def test_a_database_of_another_schema_is_refused_at_the_start(
    postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    nowhere = "127.0.0.1:1"
    common = {"tokenizer_dir": DEMO_MODEL, "port": 0, "triton_grpc": nowhere}
    common |= {"redis_url": f"redis://{nowhere}", "store_dir": tmp_path / "store"}
    with postgresql.database() as empty, postgresql.database() as newer:
        upgrade_database(newer)
        postgresql.execute(NEWEST, newer.rpartition("/")[2])
        cases = [
            {"database_url": url, "workers": workers, **common}
            for url in (empty, newer)
            for workers in (1, 2)
        ]
        told = refusals(*cases)
    for text in told[:2]:
        assert "GATEWAY_DATABASE_URL: the database is empty; run `gateway database upgrade`" in text
    for text in told[2:]:
        assert "GATEWAY_DATABASE_URL: the schema of the database has version 9999" in text
        assert "run a newer release of the gateway" in text
    assert postgresql.password not in "".join(told)


def test_a_newer_sqlite_is_refused_at_the_start(tmp_path: Path) -> None:
    settings = {"tokenizer_dir": DEMO_MODEL, "port": 0, "triton_grpc": "127.0.0.1:1"}
    write_sqlite(tmp_path)
    file = tmp_path / "@database" / "gateway.sqlite"
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute(NEWEST)
    [text] = refusals({"store_dir": tmp_path, **settings})
    assert "the schema of the database has version 9999" in text
    assert "run a newer release of the gateway" in text
    # The gateway that was refused has changed nothing.
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT value FROM facts WHERE name = 'schema'").fetchall() == [
            ("9999",)
        ]
