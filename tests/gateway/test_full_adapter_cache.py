"""More adapters than the engine's cache can hold: which tenant gets the next free space."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ops.commands.up import DEMO_MODEL
from tests.support.adapter_store import becomes
from tests.support.fake_triton import serving
from tests.support.gateway_process import body, tenant, write_config
from tests.support.generated_adapters import write_adapter
from tests.support.in_process import running
from tests.support.lora_triton import LoraTriton
from triton_repo.cpu_executor import engine

RANK = 2
NBYTES = 36_864  # size of an adapter of this rank
SETTINGS: dict[str, Any] = {
    "tokenizer_dir": DEMO_MODEL,
    "model_name": "demo",
    "max_seq_len": 2048,
}


async def test_it_is_the_tenant_with_the_fewest_in_use(tmp_path: Path) -> None:
    config = write_config(tmp_path / "c.yaml", tenant("flood", "kf"), tenant("other", "ko"))
    names = ["a0", "a1", "a2", "a3", "a4", "b"]
    for seed, name in enumerate(names):
        write_adapter(tmp_path / name, DEMO_MODEL, seed, RANK)
    triton = LoraTriton(2 * NBYTES)
    async with (
        serving(triton) as endpoint,
        running(
            tmp_path,
            endpoint,
            **SETTINGS,
            config=config,
            adapters={name: tmp_path / name for name in names},
        ) as (client, service, _),
    ):
        await becomes(lambda: len(service.adapters.records) == len(names))
        ids = [service.adapters.resolve(name)[0].task_id for name in names]
        [replica] = service.replicas
        room = replica.engine.residency.budget

        def ask(key: str, model: str) -> asyncio.Task[object]:
            headers = {"authorization": f"Bearer {key}"}
            asked = body(model=model, max_tokens=2)
            return asyncio.create_task(client.post("/v1/completions", json=asked, headers=headers))

        asked = [ask("kf", name) for name in names[:2]]
        await becomes(lambda: triton.running == set(ids[:2]))
        # The engine refuses the first of these for lack of space, so the others wait unsent.
        for count in (1, 2, 3):
            asked.append(ask("kf", names[1 + count]))
            await becomes(lambda count=count: room.waiting == set(ids[2 : 2 + count]))
        asked.append(ask("ko", "b"))
        await becomes(lambda: room.waiting == set(ids[2:]))
        triton.ended[ids[0]].set()
        await becomes(lambda: len(triton.running) == 2 and ids[0] not in triton.running)
        assert triton.running == {ids[1], ids[-1]}
        for task_id in ids:
            triton.ended[task_id].set()
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200] * len(names)


@pytest.fixture(scope="module")
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    engine.build(
        DEMO_MODEL, folder, max_batch_size=4, lora_target_modules=engine.lora_modules(DEMO_MODEL)
    )
    return folder


async def test_an_adapter_larger_than_the_cache_is_named_and_not_sent(
    tmp_path: Path, engine_dir: Path
) -> None:
    triton = LoraTriton(NBYTES - 1, engine_dir)
    write_adapter(tmp_path / "big", DEMO_MODEL, 0, RANK)
    async with (
        serving(triton) as endpoint,
        running(tmp_path, endpoint, **SETTINGS, adapters={"big": tmp_path / "big"}) as (
            client,
            service,
            _,
        ),
    ):
        await becomes(lambda: len(service.adapters.records) == 1)
        refused = await client.post("/v1/completions", json=body(model="big"))
        assert refused.status_code == 500
        error = refused.json()["error"]
        assert error["code"] == "adapter_does_not_fit"
        assert f"`big` has {NBYTES} bytes" in error["message"]
        assert "lora_cache_host_memory_bytes" in error["message"]
        asked = {"model": "big", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
        refused = await client.post("/v1/messages", json=asked)
        assert refused.status_code == 500
        assert "`big`" in refused.json()["error"]["message"]
        assert triton.brought == []


async def test_where_one_cache_is_too_small_another_replica_is_asked(
    tmp_path: Path, engine_dir: Path
) -> None:
    small, large = LoraTriton(NBYTES - 1, engine_dir), LoraTriton(2 * NBYTES, engine_dir)
    names = ["one", "two"]
    for seed, name in enumerate(names):
        write_adapter(tmp_path / name, DEMO_MODEL, seed, RANK)
    async with (
        serving(small) as first,
        serving(large) as second,
        running(
            tmp_path,
            f"{first},{second}",
            **SETTINGS,
            adapters={name: tmp_path / name for name in names},
        ) as (client, service, _),
    ):
        await becomes(lambda: len(service.adapters.records) == 2)
        await becomes(lambda: all(replica.engine.ready for replica in service.replicas))
        # At the latest the second request tries the small replica: the large one is busy.
        asked = [
            asyncio.create_task(client.post("/v1/completions", json=body(model=name, max_tokens=2)))
            for name in names
        ]
        await becomes(lambda: len(large.running) == 2)
        for name in names:
            large.ended[service.adapters.resolve(name)[0].task_id].set()
        answers = await asyncio.gather(*asked)
        assert [answer.status_code for answer in answers] == [200, 200]
        assert small.brought == []
        assert len(large.brought) == 2
