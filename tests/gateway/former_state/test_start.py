"""Starts of gateways on the state of the release before, through the public door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from gateway.config.tenants import new_key
from gateway.former_state import overrides as former_overrides
from gateway.former_state.keys import KEYS
from gateway.scheduling.discovery import DEFAULT_WEIGHT
from gateway.tenancy.keys.record import KeyRecord, make_record
from tests.support.adapter_store import becomes
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import running, save_tokenizer
from tests.support.patience import PATIENCE_S
from tests.support.redis_server import RedisServer, running_redis
from tests.support.upgraded_database import upgrade_database

OF_THE_FILE, ADMIN = "sk-the-key-of-acme", new_key()
REPLICA = "127.0.0.1:1"
NOW = 1_800_000_000
NOT_YET = "keys made over the API are not accepted yet"


class Door:
    """Requests to a gateway, and its problems."""

    def __init__(self, client: httpx.AsyncClient, service: Any) -> None:
        self._client = client
        self._service = service

    async def status(self, key: str) -> int:
        return (await self._get("/v1/models", key)).status_code

    async def status_becomes(self, key: str, status: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.status(key) != status:
                await asyncio.sleep(0.02)

    async def admin(self, method: str, path: str, **body: Any) -> httpx.Response:
        more = {"json": body} if body else {}
        return await self._client.request(method, path, headers=_bearer(ADMIN), **more)

    async def weight(self) -> float:
        state = (await self.admin("GET", "/v1/admin/state")).json()
        return float(state["replicas"][REPLICA]["weight"])

    async def weight_becomes(self, weight: float) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.weight() != weight:
                await asyncio.sleep(0.02)

    def troubles(self) -> str:
        return " ".join(str(facts["text"]) for facts in self._service.troubles.facts().values())

    async def _get(self, path: str, key: str) -> httpx.Response:
        return await self._client.get(path, headers=_bearer(key))


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


Start = Callable[[RedisServer], AbstractAsyncContextManager[Door]]


@pytest.fixture(params=["sqlite", "postgresql"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """Return a function that starts the same gateway, whose Triton never answers."""
    save_tokenizer(tmp_path)
    config = write_config(tmp_path / "c.yaml", tenant("acme", OF_THE_FILE))
    settings: dict[str, Any] = {"config": config, "admin_key": ADMIN}
    if request.param == "postgresql":
        settings["database_url"] = request.getfixturevalue("postgresql_url")
        upgrade_database(settings["database_url"])

    @asynccontextmanager
    async def run(redis: RedisServer) -> AsyncIterator[Door]:
        own = {"redis_url": redis.url, **settings}
        async with running(tmp_path, REPLICA, ready=False, **own) as (client, service, _):
            yield Door(client, service)

    return run


@pytest.fixture
def lasting_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """Yield a Redis that has its data after `kill` and `start`."""
    config = tmp_path / "redis.conf"
    config.write_text("appendonly yes\nappendfsync always\n")
    with running_redis(config) as server:
        yield server


def _write_key(client: redis.Redis, record: KeyRecord) -> None:
    client.hset(KEYS, mapping={record.id: record.model_dump_json(), "@revision": "1"})


async def test_keys_wait_for_redis_once(start: Start, lasting_redis: RedisServer) -> None:
    record, key = make_record("acme", "", None, "sha256:" + "a" * 8)
    with lasting_redis.client() as client:
        _write_key(client, record)
    lasting_redis.kill()
    async with start(lasting_redis) as door:
        for unknown in (key, "sk-guess"):
            assert await door.status(unknown) == 503
        assert await door.status(OF_THE_FILE) == 200
        for method, body in (("GET", {}), ("POST", {"tenant": "acme"})):
            answer = await door.admin(method, "/v1/keys", **body)
            assert answer.json()["error"]["code"] == "database_unavailable"
        await becomes(lambda: NOT_YET in door.troubles())
        lasting_redis.start()
        await door.status_becomes(key, 200)
        assert await door.status("sk-guess") == 401
        await becomes(lambda: NOT_YET not in door.troubles())
    # The database has the key, so the next start does not need Redis.
    lasting_redis.kill()
    async with start(lasting_redis) as door:
        assert await door.status(key) == 200
        assert await door.status("sk-guess") == 401
        assert NOT_YET not in door.troubles()


async def test_a_key_that_ends_during_an_upgrade_ends_at_the_next_start(
    start: Start, redis_server: RedisServer, at_redis: redis.Redis
) -> None:
    (kept, key), (ended, old) = (make_record("acme", "", None, "sha256:" + "a" * 8) for _ in "12")
    late, late_key = make_record("acme", "", None, "sha256:" + "a" * 8)
    _write_key(at_redis, kept)
    _write_key(at_redis, ended)
    async with start(redis_server) as door:
        assert [await door.status(each) for each in (key, old, late_key)] == [200, 200, 401]
        # A gateway of the release before revokes a key, and creates another one.
        _write_key(at_redis, ended.model_copy(update={"revoked": NOW}))
        _write_key(at_redis, late)
        assert (await door.admin("DELETE", f"/v1/keys/{kept.id}")).status_code == 200
    async with start(redis_server) as door:
        assert [await door.status(each) for each in (key, old, late_key)] == [401, 401, 200]
        listed = (await door.admin("GET", "/v1/keys")).json()["data"]
        assert [each["id"] for each in listed] == [late.id]


async def test_an_override_that_was_taken_back_does_not_return(
    start: Start, redis_server: RedisServer, at_redis: redis.Redis
) -> None:
    fields = {REPLICA: '{"weight": 7}', "@revision": "1"}
    at_redis.hset(former_overrides.KEY, mapping=fields)  # type: ignore[arg-type]
    async with start(redis_server) as door:
        assert await door.weight() == 7
        answer = await door.admin("DELETE", f"/v1/admin/replicas/{REPLICA}")
        assert answer.status_code == 200
        await door.weight_becomes(DEFAULT_WEIGHT)
    async with start(redis_server) as door:
        assert await door.weight() == DEFAULT_WEIGHT


async def test_no_override_is_set_before_the_former_ones_are_known(
    start: Start, lasting_redis: RedisServer
) -> None:
    with lasting_redis.client() as client:
        fields = {"10.0.0.9:8001": '{"drain": true}', "@revision": "1"}
        client.hset(former_overrides.KEY, mapping=fields)  # type: ignore[arg-type]
    lasting_redis.kill()
    async with start(lasting_redis) as door:
        answer = await door.admin("POST", f"/v1/admin/replicas/{REPLICA}", weight=3)
        assert answer.json()["error"]["code"] == "database_unavailable"
        assert answer.status_code == 503
