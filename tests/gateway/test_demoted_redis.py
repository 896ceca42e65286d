"""Demotion of a Redis primary to a replica behind its address: reports of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ops.commands.up import DEMO_MODEL
from ops.local_stack.ports import LOCALHOST
from tests.support.gateway_process import GatewayProcess, body, tenant, write_config
from tests.support.generated_adapters import write_adapter
from tests.support.limit_requests import until
from tests.support.local_stack import Stack
from tests.support.metrics import metric
from tests.support.moved_redis import KINDS, binaries, one_address, why_missing
from tests.support.patience import PATIENCE_S

ADMIN_KEY = "an-admin-key-of-enough-characters"
REPLICA = "Redis cannot be used: it is a replica, not the primary"


@pytest.mark.parametrize("kind", KINDS)
def test_a_demotion_is_told_and_what_is_added_meanwhile_is_shared_later(
    kind: str, stack: Stack, tmp_path: Path
) -> None:
    if kind not in binaries():
        pytest.skip(why_missing(kind))
    config = write_config(tmp_path / "c.yaml", tenant("t", "sk-t-key", requests_per_minute=3))
    folder = write_adapter(tmp_path / "peft", DEMO_MODEL, seed=1)
    files = [("file", (path.name, path.read_bytes())) for path in sorted(folder.iterdir())]
    with (
        one_address(binaries()[kind]) as redis,
        GatewayProcess(
            tmp_path,
            stack,
            config=config,
            redis_url=redis.url,
            redis_timeout=6,
            admin_port=0,
            admin_key=ADMIN_KEY,
        ) as gateway,
        gateway.client("sk-t-key") as client,
        gateway.client(ADMIN_KEY) as admin,
    ):
        api = f"http://127.0.0.1:{gateway.admin_port}"

        def ready() -> dict[str, Any]:
            answer = admin.get(f"{api}/health/ready")
            assert answer.status_code == 200  # the gateway serves without Redis, too
            found: dict[str, Any] = answer.json()
            return found

        def add(name: str) -> dict[str, Any]:
            fields = {"name": name, "base": "demo"}
            answer = admin.post(f"{api}/v1/adapters", data=fields, files=files)
            assert answer.status_code == 201, answer.text
            found: dict[str, Any] = answer.json()
            return found

        def value(name: str) -> float | None:
            return metric(f"{api}/metrics", name)

        until(lambda: value("gateway_limits_shared") == 1)
        assert add("before")["shared"] is True
        assert client.post("/v1/completions", json=body()).status_code == 200
        first, second = redis.servers
        with first.client() as writer:
            writer.set("all before", "is in the other")
            assert writer.wait(1, int(1000 * PATIENCE_S)) == 1
        first.client().execute_command("REPLICAOF", LOCALHOST, second.port)
        # No request comes meanwhile, so the gateway must notice the demotion by polling.
        until(lambda: value("gateway_limits_shared") == 0)
        until(lambda: value("gateway_adapter_store_redis_up") == 0)
        assert ready()["redis"] == "down"
        until(lambda: any(REPLICA in each["text"] for each in ready()["troubles"]))
        added = add("meanwhile")
        assert added["shared"] is False
        assert "meanwhile is not shared yet" in added["warnings"][0]
        statuses = [client.post("/v1/completions", json=body()).status_code for _ in range(5)]
        assert statuses == [200] * 3 + [429] * 2, "it does not count alone"
        assert value("gateway_limits_refused_values_total") == 0
        # Keys are in the gateway's database, and so need no Redis.
        made = admin.post(f"{api}/v1/keys", json={"tenant": "t"})
        assert made.status_code == 201
        headers = {"authorization": f"Bearer {made.json()['value']}"}
        assert client.get("/v1/models", headers=headers).status_code == 200

        second.client().execute_command("REPLICAOF", "NO", "ONE")
        redis.forwarder.target = second.port
        until(lambda: value("gateway_limits_shared") == 1)
        until(lambda: ready()["redis"] == "up")
        until(lambda: not any(REPLICA in each["text"] for each in ready().get("troubles", ())))
        names = "lora:demo:names"
        until(lambda: {b"before", b"meanwhile"} <= set(second.client().hkeys(names)))
        until(lambda: value("gateway_adapter_store_unsent") == 0)
        assert [*second.client().scan_iter("lora:demo:version:*")]
        answer = client.post("/v1/completions", json=body())
        # The new primary has counted the first request, but not those counted without Redis.
        assert (answer.status_code, answer.headers["x-ratelimit-remaining-requests"]) == (200, "1")
