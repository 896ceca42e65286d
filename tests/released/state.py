"""Recording and restoring of a gateway's state, and what a client finds in it.

``python -m tests.released.state`` records the state that this release writes into
tests/data/released: run it at each release. `test_released` reads all of them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import tarfile
import tempfile
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import redis

from adapters.registry import Registry
from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import ids_of, running, save_tokenizer
from tests.support.lora_files import content
from tests.support.patience import PATIENCE_S
from tests.support.redis_server import RedisServer, running_redis

ROOT = Path(__file__).parents[2]
RELEASED = ROOT / "tests/data/released"
# Keys that are part of the recorded state in each release's file.
ADMIN = "sk-admin-of-the-recorded-states-0123456789abcdef"
OWNER = "sk-tenant-of-the-recorded-states"
GATEWAYS = "conversations:{all}:gateways"
STATE, REDIS, FOUND = "state.tar.gz", "redis.json", "found.json"
_TTL_S = 10 * 365 * 24 * 3600
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
_TEXT = "words"


@contextlib.asynccontextmanager
async def gateway(
    folder: Path, redis_url: str | None
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    """Run a gateway with a tenant and an admin. Its state is in `folder`/adapters."""
    folder.mkdir(exist_ok=True)
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    config = write_config(folder / "gateway.yaml", tenant("acme", OWNER))
    engine = FakeTriton(tokens=ids_of(folder, _TEXT), fault=None, step=0)
    settings = {"config": config, "admin_key": ADMIN, "conversations_ttl": _TTL_S}
    async with (
        serving(engine) as endpoint,
        running(folder, endpoint, redis_url=redis_url, **settings) as (client, service, _),
    ):
        yield client, service


async def write(client: httpx.AsyncClient, service: Any) -> dict[str, str]:
    """Create adapters, a key and conversations. Return the names needed to find them."""
    registry = Registry(service.adapters.store)
    await registry.load()
    for number in (1, 2):
        await registry.add("zh", "m", content(number), "test")
    await registry.rollback("zh")
    await registry.add("gone", "m", content(3), "test")
    await registry.remove("gone")
    made = await client.post("/v1/keys", json={"tenant": "acme"}, headers=_bearer(ADMIN))
    assert made.status_code == 201, made.text
    key = str(made.json()["value"])
    created = await client.post(
        "/v1/conversations",
        json={"items": [{"role": "user", "content": "before"}], "metadata": {"a": "b"}},
        headers=_bearer(key),
    )
    assert created.status_code == 200, created.text
    conversation = str(created.json()["id"])
    asked = {"model": "m", "input": "in it", "conversation": conversation}
    await _respond(client, key, asked)
    first = await _respond(client, key, {"model": "m", "input": "alone"})
    second = await _respond(
        client, key, {"model": "m", "input": "and on", "previous_response_id": first}
    )
    return {"key": key, "conversation": conversation, "first": first, "second": second}


async def _respond(client: httpx.AsyncClient, key: str, body: dict[str, Any]) -> str:
    answer = await client.post("/v1/responses", json=body, headers=_bearer(key))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def read(client: httpx.AsyncClient, names: dict[str, str]) -> dict[str, Any]:
    """Return the state that clients and admins see, as JSON equal for all releases."""
    adapter = (await _get(client, "/v1/adapters/zh", ADMIN)).json()
    # `verify` reads the weights of all versions.
    verified = await client.post("/v1/adapters/zh/verify", headers=_bearer(ADMIN))
    assert verified.status_code == 200, verified.text
    owner = names["key"]
    responses = {
        name: (await _get(client, f"/v1/responses/{names[name]}", owner)).json()
        for name in ("first", "second")
    }
    items = await _get(client, f"/v1/conversations/{names['conversation']}/items", owner)
    conversation = await _get(client, f"/v1/conversations/{names['conversation']}", owner)
    listed = (await _get(client, "/v1/keys", ADMIN)).json()["data"]
    return {
        "served": adapter["served"],
        "versions": [version["version"] for version in adapter["versions"]],
        "gone": (await client.get("/v1/adapters/gone", headers=_bearer(ADMIN))).status_code,
        "texts": {name: _texts(response["output"]) for name, response in responses.items()},
        "previous": responses["second"]["previous_response_id"],
        "items": [_texts([item]) for item in items.json()["data"]],
        "metadata": conversation.json()["metadata"],
        "keys": [key["tenant"] for key in listed if not key.get("expires_at")],
    }


def _texts(items: list[dict[str, Any]]) -> list[str]:
    return [part["text"] for item in items for part in item.get("content", ())]


async def _get(client: httpx.AsyncClient, path: str, key: str) -> httpx.Response:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await client.get(path, headers=_bearer(key))
            # Requests get 503 while the gateway copies its disk into an empty Redis.
            if found.status_code != 503:
                break
            await asyncio.sleep(0.05)
    assert found.status_code == 200, f"{path}: {found.text}"
    return found


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def dump(client: redis.Redis) -> list[list[Any]]:
    """Return all keys of a Redis: name, TTL in ms (0: none) and dumped value."""
    return [
        [key.decode(), max(0, client.pttl(key)), base64.b64encode(client.dump(key)).decode()]
        for key in sorted(client.scan_iter("*"))
    ]


def restore(client: redis.Redis, dumped: list[list[Any]]) -> None:
    """Restore the result of `dump` into an empty Redis."""
    for key, ttl_ms, value in dumped:
        client.restore(key, ttl_ms, base64.b64decode(value))


async def record(release: str, server: RedisServer) -> None:
    """Write the state of this release to tests/data/released."""
    to = RELEASED / release
    to.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "gateway"
        async with gateway(folder, server.url) as (client, service):
            names = await write(client, service)
            found = await read(client, names)
        with server.client() as at_redis:
            [wrote] = at_redis.hkeys(GATEWAYS)
            (to / REDIS).write_text(json.dumps(dump(at_redis), indent=0), encoding="utf-8")
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w:gz") as archive:
            archive.add(folder / "adapters", "adapters")
        (to / STATE).write_bytes(data.getvalue())
    expected = {"gateway": wrote.decode(), "names": names, "found": found}
    (to / FOUND).write_text(json.dumps(expected, indent=1), "utf-8")


if __name__ == "__main__":
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    with running_redis() as started:
        asyncio.run(record(version, started))
