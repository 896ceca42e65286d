"""Uploads of adapters to Triton: limits on their memory, and fair order between tenants."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from ops.commands.up import DEMO_MODEL
from tests.support.adapter_store import becomes
from tests.support.event_clock import EventClock
from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import body, tenant, write_config
from tests.support.generated_adapters import write_adapter
from tests.support.in_process import metric_of, running

ADMIN = "the-admin-key-of-the-gateway-whose-triton-does-not-read"
RANK = 64
NBYTES = 1_179_648  # size of an adapter of this rank, above the flow-control window of a stream
FLOOD = 6
FULL = "PEFT Cache is full. Could not store taskId"
SETTINGS: dict[str, Any] = {
    "tokenizer_dir": DEMO_MODEL,
    "model_name": "demo",
    "max_seq_len": 2048,
    "admin_key": ADMIN,
}


class LoraTriton(FakeTriton):
    """A Triton with LoRA and beam search that reads no request until `reads` is set."""

    def __init__(self) -> None:
        super().__init__(tokens=[1], fault=None, step=0)
        self.reads.clear()

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        answer = await super().ModelConfig(request, context)
        answer.config.input.add(name="lora_config", data_type="TYPE_INT32")
        answer.config.input.add(name="lora_weights", data_type="TYPE_FP16")
        answer.config.input.add(name="beam_width", data_type="TYPE_INT32")
        answer.config.input.add(name="len_penalty", data_type="TYPE_FP32")
        answer.config.parameters["max_beam_width"].string_value = "3"
        return answer

    @property
    def brought(self) -> list[int]:
        """Bytes of adapter weights in each received request, in order."""
        return [len(request.raw_input_contents[-1]) for request in self.requests]


async def _add(client: httpx.AsyncClient, folder: Path, seed: int) -> None:
    write_adapter(folder, DEMO_MODEL, seed, RANK)
    files = [("file", (path.name, path.read_bytes())) for path in folder.iterdir()]
    answer = await client.post(
        "/v1/adapters",
        data={"name": folder.name, "base": "demo"},
        files=files,
        headers={"authorization": f"Bearer {ADMIN}"},
    )
    assert answer.status_code == 201, answer.text
    assert answer.json()["versions"][0]["bytes"] == NBYTES


def _ask(
    client: httpx.AsyncClient,
    key: str,
    model: str,
    fields: dict[str, Any] | None = None,
    **headers: str,
) -> asyncio.Task[Any]:
    headers |= {"authorization": f"Bearer {key}"}
    asked = body(model=model, **(fields or {}))
    return asyncio.create_task(
        client.post("/v1/completions", json=asked, headers=headers, timeout=120)
    )


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
async def test_a_flood_of_one_is_bounded_and_not_before_another(
    tmp_path: Path, transport: str
) -> None:
    config = write_config(tmp_path / "c.yaml", tenant("flood", "kf"), tenant("other", "ko"))
    triton = LoraTriton()
    async with (
        serving(triton) as endpoint,
        running(
            tmp_path,
            endpoint,
            tokenizer_dir=DEMO_MODEL,
            model_name="demo",
            max_seq_len=2048,
            config=config,
            admin_key=ADMIN,
            memory_bytes=0,
            cold_send_bytes=4 * NBYTES,
            triton_transport=transport,
        ) as (client, service, _),
    ):
        names = [f"a{number}" for number in range(FLOOD)]
        for seed, name in enumerate([*names, "late", "b"]):
            await _add(client, tmp_path / name, seed)
        before = service.adapters.store.stats.disk_hits

        def read() -> int:
            return int(service.adapters.store.stats.disk_hits - before)

        flood = [_ask(client, "kf", name) for name in names]
        await becomes(lambda: service.upload_budget.waiting == FLOOD - 2)
        late = _ask(client, "kf", "late", **{"x-request-timeout": "0.5"})
        assert (await late).status_code == 504
        assert service.upload_budget.waiting == FLOOD - 2
        other = _ask(client, "ko", "b")
        await becomes(lambda: read() == 3)
        assert service.upload_budget.in_flight == 3 * NBYTES
        # A cancelled request frees its part of the budget.
        flood.pop(0).cancel()
        await becomes(lambda: read() == 4)
        assert service.upload_budget.in_flight == 3 * NBYTES
        triton.reads.set()
        answers = await asyncio.gather(*flood, other)
        assert [answer.status_code for answer in answers] == [200] * FLOOD
        assert service.upload_budget.in_flight == 0
        assert set(triton.brought) == {NBYTES}


async def test_who_shares_an_adapter_with_a_flood_does_not_wait_for_the_flood(
    tmp_path: Path,
) -> None:
    config = write_config(tmp_path / "c.yaml", tenant("flood", "kf"), tenant("other", "ko"))
    triton = LoraTriton()
    async with (
        serving(triton) as endpoint,
        running(
            tmp_path,
            endpoint,
            **SETTINGS,
            config=config,
            memory_bytes=0,
            cold_send_bytes=4 * NBYTES,
        ) as (client, service, _),
    ):
        names = ["a", "b", "c", "shared"]
        for seed, name in enumerate(names):
            await _add(client, tmp_path / name, seed)
        before = service.adapters.store.stats.disk_hits
        flood = [_ask(client, "kf", name) for name in names[:2]]
        await becomes(lambda: service.upload_budget.in_flight == 2 * NBYTES)
        flood += [_ask(client, "kf", name) for name in names[2:]]
        await becomes(lambda: service.upload_budget.waiting == 2)
        other = _ask(client, "ko", "shared")
        await becomes(lambda: service.adapters.store.stats.disk_hits - before == 3)
        # The upload for the other tenant also serves the flood's request for this adapter.
        await becomes(lambda: service.upload_budget.waiting == 1)
        triton.reads.set()
        answers = await asyncio.gather(*flood, other)
        assert [answer.status_code for answer in answers] == [200] * 5
        assert service.upload_budget.in_flight == 0
        assert triton.brought.count(NBYTES) == len(names)


async def test_who_waits_too_long_is_refused(tmp_path: Path) -> None:
    triton = LoraTriton()
    async with (
        serving(triton) as endpoint,
        running(
            tmp_path,
            endpoint,
            **SETTINGS,
            cold_send_bytes=1,
            queue_timeout=0.5,
        ) as (client, service, _),
    ):
        for seed, name in enumerate(("a", "b")):
            await _add(client, tmp_path / name, seed)
        # This adapter exceeds the budget of all uploads, so it is uploaded alone.
        first = _ask(client, "any", "a")
        await becomes(lambda: service.upload_budget.in_flight == 1)
        refused = await _ask(client, "any", "b")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        triton.reads.set()
        assert (await first).status_code == 200
        assert (await _ask(client, "any", "b")).status_code == 200


async def test_deadlines_of_who_waits_its_turn_say_nothing_of_the_replica(tmp_path: Path) -> None:
    """Four queued requests time out. If they counted as failures, three would open the breaker."""
    clock = EventClock()
    triton = LoraTriton()
    async with (
        serving(triton) as endpoint,
        running(
            tmp_path,
            endpoint,
            **SETTINGS,
            cold_send_bytes=1,
            queue_timeout=3600,
        ) as (client, service, _),
    ):
        for seed, name in enumerate(("a", "b")):
            await _add(client, tmp_path / name, seed)
        first = _ask(client, "any", "a")
        await becomes(lambda: service.upload_budget.in_flight == 1)
        for _ in range(4):
            waits = _ask(client, "any", "b", **{"x-request-timeout": "11"})
            await becomes(lambda: service.upload_budget.waiting == 1)
            clock.leap(11.5)
            assert (await waits).status_code == 504
        assert metric_of(service, "gateway_replica_failing", replica=endpoint) == 0
        triton.reads.set()
        assert (await first).status_code == 200
        assert (await _ask(client, "any", "b")).status_code == 200


async def test_who_found_no_room_at_the_engine_and_waits_says_nothing_of_the_replica(
    tmp_path: Path,
) -> None:
    clock = EventClock()
    triton = LoraTriton()
    triton.reads.set()
    triton.fault = "slow"
    async with (
        serving(triton) as endpoint,
        running(tmp_path, endpoint, **SETTINGS) as (client, service, _),
    ):
        for seed, name in enumerate(("a", "b")):
            await _add(client, tmp_path / name, seed)
        [replica] = service.replicas
        first = _ask(client, "any", "a")
        await becomes(lambda: triton.reached == 1)
        triton.fault, triton.error = "error", FULL
        waits = _ask(client, "any", "b", **{"x-request-timeout": "11"})
        await becomes(
            lambda: replica.engine.residency.budget.waiting and not replica.engine.has_received
        )
        clock.leap(11.5)
        assert (await waits).status_code == 504
        assert replica.last_failure is None
        assert not triton.stopped
        triton.fault = None
        triton.released.set()
        assert (await first).status_code == 200
        assert (await _ask(client, "any", "b")).status_code == 200


@pytest.mark.parametrize("beams", [0, 3])
@pytest.mark.parametrize("how", ["hang-up", "deadline"])
async def test_who_leaves_before_the_engine_was_given_its_prompt_pays_nothing(
    tmp_path: Path, how: str, beams: int
) -> None:
    """A request that ends while its upload is queued is not charged for its prompt."""
    search = {"use_beam_search": True, "n": beams, "max_tokens": 5} if beams else {}
    clock = EventClock()
    triton, log = LoraTriton(), tmp_path / "usage.jsonl"
    async with (
        serving(triton) as endpoint,
        running(
            tmp_path,
            endpoint,
            **SETTINGS,
            cold_send_bytes=1,
            queue_timeout=3600,
            usage_log=log,
        ) as (client, service, _),
    ):
        for seed, name in enumerate(("a", "b")):
            await _add(client, tmp_path / name, seed)
        given = _ask(client, "any", "a", search)
        await becomes(lambda: service.upload_budget.in_flight == 1)
        waits = _ask(client, "any", "b", search, **{"x-request-timeout": "50"})
        await becomes(lambda: service.upload_budget.waiting == 1)
        if how == "hang-up":
            waits.cancel()
        else:
            clock.leap(60)
            assert (await waits).status_code == 504
        await becomes(lambda: service.upload_budget.waiting == 0)
        given.cancel()
        await becomes(lambda: log.exists() and len(log.read_text().splitlines()) == 2)
    paid = {(r := json.loads(line))["adapter"]: r for line in log.read_text().splitlines()}
    assert paid["b"]["prompt_tokens"] == paid["b"]["completion_tokens"] == 0
    assert paid["a"]["prompt_tokens"] > 0
    assert paid["a"]["completion_tokens"] == 5 * beams
