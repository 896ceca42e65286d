"""A gateway for operators, with two real Tritons, Redis, tenants, adapters and an admin."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

from gateway.config.tenants import new_key
from tests.support.cluster import Tritons, demo_engine, tritons
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.limit_requests import PATIENT_S
from tests.support.redis_server import running_redis
from tests.support.triton_server import LONG_ANSWER, long_model

ADMIN = new_key()
ACME, TIGHT = "sk-the-key-of-acme", "sk-the-key-of-tight"
STRANGE = "__proto__"
"""A tenant's name that is a property of JavaScript objects."""
DEMO_ADAPTERS = Path(__file__).parents[2] / "demo" / "adapters"
_WITHIN_S = 300.0


@dataclass
class OperatedGateway:
    gateway: GatewayProcess
    tritons: Tritons

    @property
    def url(self) -> str:
        return self.gateway.url

    def ask(self, key: str = ACME, **fields: Any) -> httpx.Response:
        headers = fields.pop("headers", {})
        with self.gateway.client(key) as client:
            return client.post("/v1/completions", json=body(**fields), headers=headers)

    def admin(self, method: str, path: str, **request: Any) -> httpx.Response:
        with self.gateway.client(ADMIN) as client:
            return client.request(method, path, **request)

    def state(self) -> dict[str, Any]:
        answer = self.admin("GET", "/v1/admin/state")
        assert answer.status_code == 200, answer.text
        state: dict[str, Any] = answer.json()
        return state

    def until(self, met: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Wait until the state meets the condition, and return the state."""
        deadline = time.monotonic() + _WITHIN_S
        while not met(state := self.state()):
            assert time.monotonic() < deadline, json.dumps(state, indent=1)[:8000]
            time.sleep(0.1)
        return state

    def give_back(self) -> None:
        """Reset what admins have set for replicas."""
        for endpoint in [replica.endpoint for replica in self.tritons.replicas]:
            answer = self.admin("DELETE", f"/v1/admin/replicas/{endpoint}")
            assert answer.status_code == 200, answer.text
        self.until(lambda state: all(it["state"] == "ready" for it in state["replicas"].values()))

    def upload(self, name: str, demo: str) -> dict[str, Any]:
        """Upload a demo adapter under another name. An existing name gets a new version."""
        files = [("file", (path.name, path.read_bytes())) for path in adapter_files(demo)]
        data = {"name": name, "base": "demo"}
        answer = self.admin("POST", "/v1/adapters", data=data, files=files)
        assert answer.status_code == 201, answer.text
        adapter: dict[str, Any] = answer.json()
        return adapter

    @contextmanager
    def running(self, count: int = 1, **fields: Any) -> Iterator[list[str]]:
        """Run `count` answers that outlast any test. Yield their request ids.

        Answers that still run at the end are stopped.
        """
        before = set(self.state()["requests"])

        def ask() -> None:
            long = {"prompt": "Count", "max_tokens": LONG_ANSWER, "ignore_eos": True}
            self.ask(**long | {"stream": True} | fields)

        threads = [Thread(target=ask) for _ in range(count)]
        for thread in threads:
            thread.start()
        state = self.until(lambda state: self._new(state, before, count))
        try:
            yield self._new(state, before, count)
        finally:
            for request_id in set(self.state()["requests"]) - before:
                self.admin("POST", f"/v1/admin/requests/{request_id}/cancel")
            for thread in threads:
                thread.join(_WITHIN_S)

    @staticmethod
    def _new(state: dict[str, Any], before: set[str], count: int) -> list[str]:
        found = [
            request_id
            for request_id, request in state["requests"].items()
            if request_id not in before and request["completion_tokens"]
        ]
        return found if len(found) == count else []


def adapter_files(demo: str) -> list[Path]:
    return sorted((DEMO_ADAPTERS / demo).glob("adapter_*"))


@contextmanager
def run_operated_gateway(folder: Path, **settings: Any) -> Iterator[OperatedGateway]:
    config = write_config(
        folder / "c.yaml",
        tenant("acme", ACME, concurrent_requests=50, tokens_per_day=50_000_000),
        tenant("tight", TIGHT, requests_per_minute=1),
        tenant(STRANGE, "sk-the-key-of-a-strange-name"),
    )
    engine = demo_engine(folder / "engine", long_model(folder))
    with ExitStack() as started:
        redis = started.enter_context(running_redis())
        pair = started.enter_context(tritons(folder, engine))
        own = {
            "config": config,
            "admin_key": ADMIN,
            "redis_url": redis.url,
            "redis_timeout": PATIENT_S,
            "max_adapter_bytes": 8 * 1024 * 1024,
            "replica_drain_grace": 0.2,
        }
        gateway = started.enter_context(GatewayProcess(folder / "gateway", pair, **own | settings))
        made = OperatedGateway(gateway, pair)
        made.until(lambda state: all(it["state"] == "ready" for it in state["replicas"].values()))
        for name in ("zh", "ja"):
            made.upload(name, name)
        yield made
