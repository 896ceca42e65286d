"""Requests between workers for the console if a worker is stuck, full or asked too often."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gateway.config.tenants import new_key
from tests.support.consoles import until
from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.redis_server import RedisServer
from tests.support.triton_server import LONG_ANSWER

ACME, ADMIN = "sk-the-key-of-acme", new_key()
STREAM = {
    "model": "demo",
    "prompt": "Count",
    "stream": True,
    "ignore_eos": True,
    "max_tokens": LONG_ANSWER,
}
UNKNOWN = "/v1/requests/of-nobody"
LEAVER = "who-leaves"
LINE = f"[{LEAVER}]: GET /v1/requests/{{request_id}} "
MOST_WAITING, MANY = 16, 40
MOST_BUSY = 2


@pytest.fixture(scope="module")
def gateway(
    long_stack: Stack, tmp_path_factory: pytest.TempPathFactory, shared_redis: RedisServer
) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("workers")
    with _two_workers(folder, long_stack, shared_redis) as running:
        yield running


@contextmanager
def _two_workers(
    folder: Path, stack: Stack, redis: RedisServer, **more: Any
) -> Iterator[GatewayProcess]:
    config = write_config(folder / "c.yaml", tenant("acme", ACME))
    settings: dict[str, Any] = {"config": config, "admin_key": ADMIN, "redis_url": redis.url}
    with GatewayProcess(folder / "g", stack, workers=2, **settings | more) as running:
        yield running


@contextmanager
def _one_frozen(gateway: GatewayProcess) -> Iterator[None]:
    """Pause one of two workers with SIGSTOP. The other worker accepts all connections meanwhile."""
    until(gateway, ADMIN, lambda state: state["gateway"]["answering"] == 2)
    frozen = psutil.Process(gateway.process.pid).children()[0].pid
    os.kill(frozen, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(frozen, signal.SIGCONT)


def test_what_a_stuck_worker_may_have_is_not_said_to_be_nowhere(gateway: GatewayProcess) -> None:
    with _one_frozen(gateway):
        with gateway.client(ACME) as client:
            seen = client.get(UNKNOWN)
            assert (seen.status_code, seen.json()["error"]["code"]) == (503, "overloaded")
            assert seen.headers["x-should-retry"] == "true"
            # These ids are invalid, so the worker answers without asking the other worker.
            assert client.get("/v1/requests/" + "x" * 129).status_code == 404
            assert client.get("/v1/requests/a%20b").status_code == 404
        with gateway.client(ADMIN) as client:
            done = client.post("/v1/admin/requests/of-nobody/cancel")
            assert (done.status_code, done.json()["error"]["code"]) == (503, "overloaded")
    with gateway.client(ACME) as client:
        assert client.get(UNKNOWN).status_code == 404
    # The log has a line for each client's request, but none for requests between workers.
    assert "/internal/" not in gateway.text


def test_who_asks_without_end_and_leaves_has_little_here(gateway: GatewayProcess) -> None:
    """Requests of disconnected clients are dropped, and few requests of a tenant may wait."""
    named = f"host: x\r\nx-request-id: {LEAVER}\r\nauthorization: Bearer {ACME}\r\n\r\n"
    head = f"GET {UNKNOWN} HTTP/1.1\r\n{named}"
    with _one_frozen(gateway):
        with ExitStack() as opened:
            for _ in range(MANY):
                client = socket.create_connection(("127.0.0.1", gateway.port))
                opened.enter_context(client).sendall(head.encode())
            gateway.wait_for(LINE, MANY - MOST_WAITING)
        gateway.wait_for(LINE, MANY)
        lines = [line for line in gateway.text.splitlines() if LINE in line]
    statuses = [line.partition(LINE)[2][:3] for line in lines]
    assert set(statuses) == {"499", "503"}
    assert statuses.count("499") <= MOST_WAITING


def test_an_admin_sees_and_ends_requests_while_workers_have_as_many_as_they_take(
    long_stack: Stack, tmp_path: Path, shared_redis: RedisServer
) -> None:
    more: dict[str, Any] = {"max_connections": MOST_BUSY, "admin_port": 0}
    with (
        _two_workers(tmp_path, long_stack, shared_redis, **more) as full,
        httpx.Client(
            base_url=f"http://127.0.0.1:{full.admin_port}",
            headers={"authorization": f"Bearer {ADMIN}"},
            timeout=60,
        ) as admin,
        ExitStack() as opened,
    ):
        answers: list[httpx.Response] = []
        while len(answers) < 2 * MOST_BUSY:
            client = opened.enter_context(full.client(ACME))
            answer = opened.enter_context(client.stream("POST", "/v1/completions", json=STREAM))
            if answer.status_code == 200:
                answers.append(answer)
        deadline = time.monotonic() + 60
        while (state := admin.get("/v1/admin/state").json())["gateway"]["answering"] < 2:
            assert time.monotonic() < deadline, full.text
        requests = state["requests"]
        assert {request["worker"] for request in requests.values()} == {0, 1}
        for request_id in requests:
            assert admin.post(f"/v1/admin/requests/{request_id}/cancel").status_code == 200
        for answer in answers:
            assert "ended_by_operator" in answer.read().decode()
