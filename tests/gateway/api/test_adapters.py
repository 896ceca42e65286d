"""Removal and rollback of adapters: all gateways then do what the API has reported."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from adapters.registry import Registry
from gateway.config.tenants import new_key
from tests.support.adapter_store import becomes
from tests.support.fake_triton import FakeTriton, serving
from tests.support.full_disk import full_disk
from tests.support.in_process import metric_of, running, save_tokenizer
from tests.support.lora_files import content
from tests.support.redis_server import RedisServer

ADMIN = new_key()
AUTHORIZED = {"authorization": f"Bearer {ADMIN}"}
SMALLER_THAN_ANY_RECORD = 64


def _folder(path: Path) -> Path:
    path.mkdir()
    save_tokenizer(path)
    return path


async def test_a_removal_on_a_full_disk_is_refused_or_holds_everywhere(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    engine = FakeTriton(tokens=[1], fault=None, step=0)
    shared = {"admin_key": ADMIN, "redis_url": redis_server.url}
    async with (
        serving(engine) as endpoint,
        running(_folder(tmp_path / "alone"), endpoint, admin_key=ADMIN) as (alone, single, _),
        running(_folder(tmp_path / "a"), endpoint, **shared) as (one, service, _),
        running(_folder(tmp_path / "b"), endpoint, **shared) as (_, other, _),
    ):
        for each in (single, service):
            await Registry(each.adapters.store).add("zh", "m", content(1), "test")
        await becomes(lambda: other.adapters.records)
        with full_disk(SMALLER_THAN_ANY_RECORD):
            refused = await alone.delete("/v1/adapters/zh", headers=AUTHORIZED)
            assert refused.status_code == 500
            assert refused.json()["error"]["code"] == "adapter_store_error"
            kept = await alone.get("/v1/adapters/zh", headers=AUTHORIZED)
            assert kept.json()["served"] == content(1).digest[:12]

            removed = await one.delete("/v1/adapters/zh", headers=AUTHORIZED)
            assert removed.json()["deleted"] is True
            gone = await one.get("/v1/adapters/zh", headers=AUTHORIZED)
            assert gone.status_code == 404
            await becomes(lambda: not other.adapters.records)
            assert metric_of(service, "gateway_adapter_store_unwritten") == 1
        assert single.adapters.records


async def test_a_rollback_goes_to_what_was_served_before_and_the_console_says_where(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    engine = FakeTriton(tokens=[1], fault=None, step=0)
    shared = {"admin_key": ADMIN, "redis_url": redis_server.url}
    async with (
        serving(engine) as endpoint,
        running(_folder(tmp_path / "a"), endpoint, **shared) as (_, service, _),
        running(_folder(tmp_path / "b"), endpoint, **shared) as (client, other, _),
    ):
        for number in (1, 2, 3, 2):
            await Registry(service.adapters.store).add("zh", "m", content(number), "test")
        await becomes(lambda: [record.revision for record in other.adapters.records] == [4])
        for number in (3, 1):
            before = content(number).digest[:12]
            await _is_told(client, before)
            answer = await client.post("/v1/adapters/zh/rollback", headers=AUTHORIZED)
            assert answer.json()["served"] == before
        await _is_told(client, None)
        refused = await client.post("/v1/adapters/zh/rollback", headers=AUTHORIZED)
        assert refused.status_code == 404


async def _is_told(client: httpx.AsyncClient, before: str | None) -> None:
    """Wait until the console reports `before` as the version that was served previously."""
    async with asyncio.timeout(300):
        while True:
            state = (await client.get("/v1/admin/state", headers=AUTHORIZED)).json()
            if state["adapters"]["zh"].get("before") == before:
                return
            await asyncio.sleep(0.05)
