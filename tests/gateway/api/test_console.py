"""The console's API: the state follows requests, changes equal it, strangers see nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from gateway.config.tenants import new_key
from tests.support.consoles import State, state_of, until
from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.triton_server import LONG_ANSWER

ACME, OTHER, ADMIN = "sk-the-key-of-acme", "sk-the-key-of-other", new_key()
STREAM = {"model": "demo", "stream": True, "ignore_eos": True, "max_tokens": LONG_ANSWER}


@pytest.fixture(scope="module")
def gateway(
    long_stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GatewayProcess]:
    """With one place, so that a second request waits."""
    folder = tmp_path_factory.mktemp("console")
    config = write_config(
        folder / "c.yaml",
        tenant("acme", ACME, requests_per_minute=1000),
        tenant("other", OTHER, requests_per_minute=1),
    )
    settings = {"config": config, "admin_key": ADMIN, "max_in_flight": 1, "log_format": "json"}
    with GatewayProcess(folder / "gateway", long_stack, **settings) as running:
        yield running


@contextmanager
def answering(gateway: GatewayProcess, key: str = ACME, **more: Any) -> Iterator[httpx.Response]:
    """A long answer of which the first token is there."""
    body = {**STREAM, "prompt": "Count from 1 to 300"} | more
    with (
        gateway.client(key) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, answer.read()
        lines = answer.iter_lines()
        next(lines)
        yield answer
        lines.close()  # and with it the connection: httpx ends a stream that nobody reads on


def _request(seen: State, /, **facts: Any) -> dict[str, Any] | None:
    found = [r for r in seen["requests"].values() if facts.items() <= r.items()]
    return found[0] if found else None


def test_the_state_follows_a_request_through_queue_run_and_stop(gateway: GatewayProcess) -> None:
    with answering(gateway):
        running = until(gateway, ADMIN, lambda s: _request(s, state="running"))
        assert running["tenant"] == "acme"
        assert running["model"] == "demo"
        assert running["path"] == "/v1/completions"
        assert running["prompt_tokens"] > 0
        state = state_of(gateway, ADMIN)
        [replica] = state["replicas"].values()
        assert (replica["state"], replica["in_flight"]) == ("ready", 1)
        assert running["replica"] in state["replicas"]
        assert state["tenants"]["acme"]["running"] == 1
        more = until(
            gateway,
            ADMIN,
            lambda s: (
                _request(s, state="running")["completion_tokens"]  # type: ignore[index]
                > running["completion_tokens"]
            ),
        )
        assert more

        asked = threading.Thread(target=_ask_and_leave, args=(gateway,))
        asked.start()
        waits = until(gateway, ADMIN, lambda s: _request(s, state="queued"))
        assert "replica" not in waits
        assert state_of(gateway, ADMIN)["tenants"]["acme"]["waiting"] == 1
        asked.join()
    name = running["request_id"]
    ended = until(
        gateway,
        ADMIN,
        lambda s: [r for r in s["ended"].values() if r["request_id"] == name],
    )[0]
    assert ended["status"] == 499
    assert ended["stop"] == "disconnect"
    assert 0 < ended["stop_ms"] < 2000
    assert state_of(gateway, ADMIN)["requests"] == {}


def _ask_and_leave(gateway: GatewayProcess) -> None:
    with gateway.client(ACME) as client, pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json={"model": "demo", "prompt": "Hi"}, timeout=3)
