"""Weights and drains of replicas that an admin sets for all workers and gateways."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from gateway.config.tenants import new_key
from gateway.scheduling.override import parse_override
from tests.support import commands
from tests.support.consoles import until
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.redis_server import RedisServer

ACME, ADMIN = "sk-the-key-of-acme", new_key()
TRIES = 6  # number of new connections; any worker may accept each


@pytest.fixture
def config(stack: Stack, tmp_path: Path) -> Path:
    """Write a configuration with one Triton as two replicas, so that one can be drained."""
    endpoint = stack.triton_grpc
    replicas = [{"endpoint": endpoint}, {"endpoint": _other_name(endpoint)}]
    return write_config(tmp_path / "c.yaml", tenant("acme", ACME), replicas=replicas)


def _other_name(endpoint: str) -> str:
    return endpoint.replace("127.0.0.1", "localhost")


def _say(gateway: GatewayProcess, endpoint: str, method: str = "POST", **facts: Any) -> Any:
    with gateway.client(ADMIN) as client:
        url = f"/v1/admin/replicas/{quote(endpoint, safe='')}"
        answer = client.request(method, url, **({"json": facts} if facts else {}))
    assert answer.status_code == 200, answer.text
    return answer.json()


def _seen(gateway: GatewayProcess, endpoint: str, **facts: Any) -> None:
    """Wait until each worker reports `facts`: the state shows the worst of the workers' reports."""
    for _ in range(TRIES):
        until(gateway, ADMIN, lambda s: facts.items() <= s["replicas"][endpoint].items())


def _requests(gateway: GatewayProcess, endpoint: str) -> int:
    time.sleep(1.1)  # a state is at most a second old
    number: int = until(gateway, ADMIN, lambda s: s)["replicas"][endpoint]["requests"]
    return number


def test_a_drain_holds_in_all_workers_and_is_taken_back(
    stack: Stack, config: Path, tmp_path: Path, shared_redis: RedisServer
) -> None:
    endpoint = stack.triton_grpc
    settings = {"config": config, "admin_key": ADMIN, "workers": 2, "redis_url": shared_redis.url}
    with GatewayProcess(tmp_path / "g", stack, **settings) as gateway:
        until(gateway, ADMIN, lambda s: s["gateway"]["answering"] == 2)
        told = _say(gateway, endpoint, drain=True)
        assert told["drain"] is True
        assert told["override"] == {"drain": True}
        # Both workers log the drain, whichever worker received the request.
        gateway.wait_for(f"replica {endpoint} is drained", times=2)
        _seen(gateway, endpoint, state="draining", drain=True, override={"drain": True})
        before = _requests(gateway, endpoint)
        for _ in range(2 * TRIES):
            with gateway.client(ACME) as client:
                assert client.post("/v1/completions", json=body()).status_code == 200
        assert _requests(gateway, endpoint) == before
        assert _say(gateway, endpoint, weight=5)["override"] == {"drain": True, "weight": 5.0}
        _seen(gateway, endpoint, weight=5.0)
        assert _say(gateway, endpoint, "DELETE")["override"] is None
        gateway.wait_for(f"replica {endpoint} takes requests again", times=2)
        _seen(gateway, endpoint, state="ready", drain=False, weight=100.0)
        assert "replicas.override" in gateway.text
        assert "replicas.take_back" in gateway.text


def test_it_outlasts_the_gateway(stack: Stack, config: Path, tmp_path: Path) -> None:
    endpoint = stack.triton_grpc
    settings = {"config": config, "admin_key": ADMIN}
    with GatewayProcess(tmp_path / "g", stack, **settings) as gateway:
        _say(gateway, endpoint, drain=True)
    with GatewayProcess(tmp_path / "g", stack, **settings) as gateway:
        _seen(gateway, endpoint, state="draining", override={"drain": True})


@pytest.fixture
def two(
    stack: Stack,
    config: Path,
    tmp_path: Path,
    redis_server: RedisServer,
    postgresql_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[GatewayProcess, GatewayProcess]]:
    monkeypatch.setenv("GATEWAY_DATABASE_URL", postgresql_url)
    assert commands.gateway("database", "upgrade").returncode == 0
    settings = {
        "config": config,
        "admin_key": ADMIN,
        "redis_url": redis_server.url,
        "database_url": postgresql_url,
    }
    with ExitStack() as running:
        one, other = (
            running.enter_context(GatewayProcess(tmp_path / name, stack, **settings))
            for name in ("one", "other")
        )
        yield one, other


def test_it_holds_for_all_gateways_of_a_database(
    stack: Stack, two: tuple[GatewayProcess, GatewayProcess], redis_server: RedisServer
) -> None:
    endpoint, (one, other) = stack.triton_grpc, two
    redis_server.kill()  # overrides do not need it
    _say(one, endpoint, drain=True)
    _seen(other, endpoint, state="draining", override={"drain": True})
    _say(other, endpoint, "DELETE")
    _seen(one, endpoint, state="ready", drain=False)


def test_a_gateway_refuses_what_others_would_not_see(
    stack: Stack, config: Path, tmp_path: Path, redis_server: RedisServer
) -> None:
    settings = {"config": config, "admin_key": ADMIN, "redis_url": redis_server.url}
    with (
        GatewayProcess(tmp_path / "one", stack, **settings) as one,
        GatewayProcess(tmp_path / "other", stack, **settings) as other,
    ):
        one.wait_for("gateways with databases of their own share this Redis")
        for gateway in (one, other):
            with gateway.client(ADMIN) as client:
                path = f"/v1/admin/replicas/{stack.triton_grpc}"
                refused = client.post(path, json={"drain": True})
            assert refused.status_code == 403
            assert "GATEWAY_DATABASE_URL" in refused.json()["error"]["message"]
            with gateway.client(ACME) as client:
                assert client.post("/v1/completions", json=body()).status_code == 200


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({}, "weight"),
        ({"weight": -1}, "weight"),
        ({"weight": 1e9}, "weight"),
        ({"weight": True}, "weight"),
        ({"drain": "yes"}, "drain"),
        ({"wait": 1}, "wait"),
    ],
)
def test_what_is_wrong_is_named(
    stack: Stack, up_gateway: GatewayProcess, sent: dict[str, Any], param: str
) -> None:
    with up_gateway.client(ADMIN) as client:
        answer = client.post(f"/v1/admin/replicas/{stack.triton_grpc}", json=sent)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


def test_what_is_no_replica_is_not_found(up_gateway: GatewayProcess) -> None:
    with up_gateway.client(ADMIN) as client:
        for method in ("POST", "DELETE"):
            facts = {"json": {"drain": True}} if method == "POST" else {}
            answer = client.request(method, "/v1/admin/replicas/10.0.0.9:8001", **facts)
            assert answer.status_code == 404, answer.text


@pytest.fixture(scope="module")
def up_gateway(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("replicas")
    config = write_config(folder / "c.yaml", tenant("acme", ACME))
    with GatewayProcess(folder / "g", stack, config=config, admin_key=ADMIN) as gateway:
        yield gateway


@pytest.mark.parametrize(
    "facts",
    [
        {},
        [],
        None,
        {"weight": -1},
        {"weight": float("inf")},
        {"weight": "1"},
        {"weight": True},
        {"drain": 1},
        {"weight": 1, "more": 2},
    ],
)
def test_what_no_gateway_wrote_is_no_override(facts: Any) -> None:
    with pytest.raises(ValueError, match=r"weight|drain"):
        parse_override(facts)
