"""Problems with a gateway's files and connections, reported while they last."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.local_stack import Stack
from tests.support.operated_gateway import ADMIN
from tests.support.redis_server import running_redis

_WITHIN_S = 300.0
DATABASE = "the database fails: file is not a database"
KEYS = "keys made over the API are not accepted yet"
CONVERSATIONS = "conversations are not stored in"
USAGE = "the usage log /dev/full loses records"
CONNECTIONS = "AS MANY CONNECTIONS AS GATEWAY_MAX_CONNECTIONS ALLOWS"


def _troubles(gateway: GatewayProcess) -> dict[str, str]:
    """Return the level of each reported problem by its text."""
    with gateway.client(ADMIN) as client:
        found: list[dict[str, Any]] = client.get("/health/ready").json().get("troubles", [])
    return {each["text"]: each["level"] for each in found}


def _until(gateway: GatewayProcess, met: Callable[[dict[str, str]], bool]) -> dict[str, str]:
    deadline = time.monotonic() + _WITHIN_S
    while not met(found := _troubles(gateway)):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def _has(texts: Iterable[str], *starts: str) -> bool:
    return all(any(text.startswith(start) for text in texts) for start in starts)


def test_files_that_cannot_be_used_and_connections_that_are_full(
    stack: Stack, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    for folder, name in (
        ("@database", "gateway.sqlite"),
        ("@conversations", "conversations.sqlite"),
    ):
        (store / folder).mkdir(parents=True, mode=0o700)
        (store / folder / name).write_text("no such thing " * 100, encoding="utf-8")
    config = write_config(tmp_path / "c.yaml", tenant("acme", "sk-acme"))
    with running_redis() as redis:
        own = {
            "config": config,
            "admin_key": ADMIN,
            "store_dir": store,
            "redis_url": redis.url,
            "usage_log": "/dev/full",
            "max_connections": 1,
        }
        with GatewayProcess(tmp_path / "g", stack, **own) as gateway, ExitStack() as opened:
            found = _until(gateway, lambda found: _has(found, DATABASE, KEYS, CONVERSATIONS))
            assert not _has(found, USAGE)
            assert not _has(found, CONNECTIONS)
            with gateway.client("sk-acme") as client:
                assert client.post("/v1/completions", json=body()).status_code == 200
            found = _until(gateway, lambda found: _has(found, USAGE))
            levels = {
                start: next(level for text, level in found.items() if text.startswith(start))
                for start in (DATABASE, CONVERSATIONS, USAGE)
            }
            assert levels == {DATABASE: "error", CONVERSATIONS: "error", USAGE: "error"}
            with gateway.client(ADMIN) as client:
                refused = client.post("/v1/keys", json={"tenant": "acme"})
                assert refused.json()["error"]["code"] == "database_unavailable"
            # Two requests without a body exceed the limit of one.
            for _ in range(2):
                client_socket = socket.create_connection(("127.0.0.1", gateway.port))
                opened.enter_context(client_socket)
                head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n"
                client_socket.sendall(f"{head}authorization: Bearer sk-acme\r\n\r\n".encode())
            _until(gateway, lambda found: _has(found, CONNECTIONS))
            # Without the damaged file, the gateway begins another one.
            (store / "@database" / "gateway.sqlite").unlink()
            _until(gateway, lambda found: not _has(found, DATABASE) and not _has(found, KEYS))
