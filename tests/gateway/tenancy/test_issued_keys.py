"""API keys issued over the API, shared through Redis or on disk only, and their deletion."""

from __future__ import annotations

import json
import os
import re
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
import pytest

from gateway.config.tenants import key_hash, new_key
from gateway.tenancy.keys.shared import KEYS
from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S
from tests.support.redis_server import RedisServer, running_redis

OF_THE_FILE, ADMIN = "sk-the-key-of-acme", new_key()
ACME, OTHER = tenant("acme", OF_THE_FILE), tenant("other", "sk-the-key-of-other")
HANGS_AFTER_S = 300
TRIES = 6  # new connections, so that both workers are likely to get one


@dataclass
class Pair:
    """Two gateways with separate disks and one Redis. The second gateway has two workers."""

    redis: RedisServer
    config: Path
    one: GatewayProcess
    two: GatewayProcess


@pytest.fixture(scope="module")
def pair(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("keys")
    config = write_config(folder / "c.yaml", ACME, OTHER)
    with ExitStack() as running:
        redis = running.enter_context(running_redis())
        settings = {"config": config, "admin_key": ADMIN, "redis_url": redis.url}
        one = GatewayProcess(folder / "one", stack, **settings)
        two = GatewayProcess(folder / "two", stack, workers=2, **settings)
        yield Pair(redis, config, running.enter_context(one), running.enter_context(two))


def _keys(
    gateway: GatewayProcess, method: str, path: str = "", key: str = ADMIN, **body: Any
) -> httpx.Response:
    with gateway.client(key) as client:
        return client.request(method, f"/v1/keys{path}", **({"json": body} if body else {}))


def _done(gateway: GatewayProcess, method: str, path: str = "", **body: Any) -> httpx.Response:
    """Call `_keys` again while Redis is too slow, which the gateway answers with 503."""
    deadline = time.monotonic() + HANGS_AFTER_S
    while (answer := _keys(gateway, method, path, **body)).status_code == 503:
        assert time.monotonic() < deadline, answer.text
    return answer


def _new(gateway: GatewayProcess, **body: Any) -> dict[str, Any]:
    answer = _done(gateway, "POST", tenant="acme", **body)
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def _listed(gateway: GatewayProcess) -> dict[str, dict[str, Any]]:
    return {key["id"]: key for key in _keys(gateway, "GET").json()["data"]}


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
    deadline = time.monotonic() + HANGS_AFTER_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.25)


def _becomes(gateway: GatewayProcess, key: str, status: int) -> None:
    _until(lambda: _statuses(gateway, key) == {status})


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
    everything = pair.one.text + pair.two.text + "".join(_files(pair))
    for made in (old, new):
        assert made["value"] not in everything


def _files(pair: Pair) -> Iterator[str]:
    """Yield all stored data about keys, from the disks and from Redis."""
    for path in pair.config.parent.rglob("@keys/*"):
        yield path.read_text()
    with pair.redis.client() as client:
        yield str(client.hgetall(KEYS))


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
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    # Redis is untrusted: a forged expiry has no effect, and invalid values are not overwritten.
    with pair.redis.client() as client:
        record = json.loads(client.hget(KEYS, made["id"]) or b"")
        forged = json.dumps(record | {"expires": None}).encode()
        client.hset(KEYS, mapping={made["id"]: forged, "key_x": b"\xff", "@revision": "forged"})
        pair.one.wait_for("left alone in Redis: 'api_keys key_x'", within_s=HANGS_AFTER_S)
        assert _statuses(pair.one, made["value"]) == {401}
        assert client.hmget(KEYS, [made["id"], "key_x"]) == [forged, b"\xff"]
    with pair.one.client(ADMIN) as admin:
        assert "gateway_keys_refused_values_total 1.0" in admin.get("/metrics").text


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


def test_without_redis_keys_stay_as_they_are(pair: Pair) -> None:
    kept, gone, lost = _new(pair.one), _new(pair.one), _new(pair.one)
    for made in (kept, gone, lost):
        _becomes(pair.two, made["value"], 200)
    with pair.redis.client() as client:
        before: dict[bytes, bytes] = client.hgetall(KEYS)
    assert _done(pair.one, "DELETE", f"/{lost['id']}").status_code == 200
    _becomes(pair.two, lost["value"], 401)
    pair.redis.kill()
    try:
        refused = _keys(pair.one, "POST", tenant="acme")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "keys_unavailable")
        # The gateway that gets the request ends the key, and says that other gateways may not have.
        refused = _keys(pair.one, "DELETE", f"/{gone['id']}")
        assert "ended on this gateway" in refused.json()["error"]["message"]
        assert refused.status_code == 503
        assert re.search(
            rf"keys.delete '{gone['id']}': KeysUnavailable, before {{.*}}, after null",
            pair.one.text,
        )
        assert (_statuses(pair.one, gone["value"]), _statuses(pair.two, gone["value"])) == (
            {401},
            {200},
        )
        for made, status in ((kept, 200), (lost, 401)):
            for gateway in (pair.one, pair.two):
                assert _statuses(gateway, made["value"]) == {status}
        # A gateway that starts now accepts no issued key, because the key may be deleted elsewhere.
        pair.one.__exit__(None, None, None)
        pair.one.__enter__()
        assert "KEYS MADE OVER THE API ARE NOT TAKEN YET" in pair.one.text
        assert _statuses(pair.one, kept["value"]) == _statuses(pair.one, "sk-guess") == {503}
        assert _keys(pair.one, "GET").status_code == 503
        assert _statuses(pair.one, OF_THE_FILE) == {200}
        assert httpx.get(f"{pair.one.url}/v1/models", timeout=PATIENCE_S).status_code == 401
    finally:
        pair.redis.start()
    # Restore what Redis had before the deletions.
    with pair.redis.client() as client:
        client.hset(KEYS, mapping=before)  # type: ignore[arg-type]
    for gateway in (pair.one, pair.two):
        for made, status in ((gone, 401), (lost, 401), (kept, 200)):
            _becomes(gateway, made["value"], status)
        _until(lambda: not {gone["id"], lost["id"]} & _listed(gateway).keys())  # noqa: B023
        assert kept["id"] in _listed(gateway)
    with pair.redis.client() as client:
        for made in (gone, lost):
            _until(lambda: b'"revoked":null' not in (client.hget(KEYS, made["id"]) or b""))  # noqa: B023


def test_a_gateway_without_redis_has_its_disk(stack: Stack, tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", ACME)
    gateway = GatewayProcess(tmp_path / "g", stack, config=config, admin_key=ADMIN)
    with gateway:
        used, gone = _new(gateway), _new(gateway)
        assert _statuses(gateway, used["value"]) == {200}
        assert used["created_at"] - 60 < _listed(gateway)[used["id"]]["last_used_at"]
        assert _listed(gateway)[gone["id"]]["last_used_at"] is None
        assert _keys(gateway, "DELETE", f"/{gone['id']}").status_code == 200
    with gateway:
        assert _statuses(gateway, used["value"]) == {200}
        assert _statuses(gateway, gone["value"]) == _statuses(gateway, "sk-guess") == {401}
        assert _listed(gateway)[used["id"]]["last_used_at"] % 60 == 0
