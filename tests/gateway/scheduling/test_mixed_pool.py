"""A pool of replicas in token mode and in llmapi mode: which replica gets which request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
from array import array
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import generate_latest

from gateway.catalog.placement import Placement
from gateway.generation.batch import Batch
from gateway.generation.engine_request import Generation
from gateway.generation.lora import Lora
from gateway.generation.options import DEFAULT_CALLER, GenerationParams, Options
from gateway.pipeline.fit import fit
from gateway.pipeline.prepare import prepare
from gateway.scheduling.adapter_wait import AdapterWait
from gateway.scheduling.discovery import Target
from gateway.scheduling.kinds import VariantRegistry
from tests.support.fake_llmapi import FakeLlmapi, build_outputs
from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import tenant, write_config
from tests.support.in_process import ids_of, running, save_tokenizer

OLD, NEW = "old", "new"
ONLY_OLD = {"ignore_eos": True}
ONLY_NEW = {"frequency_penalty": 0.5}
KEYS = {"greedy": "sk-the-key-of-greedy", "other": "sk-the-key-of-other"}
FOR_EVER = "for ever"
PLACES = 4


@dataclass
class Pool:
    """A gateway and two fake servers, whose answers are "old" and "new"."""

    old: FakeTriton
    new: FakeLlmapi | FakeTriton
    endpoints: dict[str, str]
    config: Path
    client: httpx.AsyncClient
    service: Any

    async def weigh(self, old: Any, new: Any) -> None:
        """Write new entries of both replicas to the file, and wait until the gateway uses them."""
        _write(self.config, self.endpoints, old, new)
        self.service.configuration.reload_now()
        wanted = [_entry(self.endpoints[OLD], old), _entry(self.endpoints[NEW], new)]

        def is_in_force() -> bool:
            found = [
                {"endpoint": r.endpoint, "weight": r.weight, "drain": r.drained_at is not None}
                for r in self.service.replicas
            ]
            return found == [{"weight": 100, "drain": False} | each for each in wanted]

        await until(is_in_force)

    async def ask(self, tenant: str | None = None, **body: Any) -> httpx.Response:
        headers = {} if tenant is None else {"authorization": f"Bearer {KEYS[tenant]}"}
        asked = {"model": "m", "prompt": "x", "max_tokens": 8} | body
        return await self.client.post("/v1/completions", json=asked, headers=headers)

    async def says(self, **body: Any) -> str:
        answer = await self.ask(**body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def in_flight(self, name: str) -> int:
        [found] = [r for r in self.service.replicas if r.endpoint == self.endpoints[name]]
        return int(found.in_flight)


def _entry(endpoint: str, given: Any) -> dict[str, Any]:
    return {"endpoint": endpoint} | (given if isinstance(given, dict) else {"weight": given})


def _write(config: Path, endpoints: dict[str, str], old: Any, new: Any) -> None:
    replicas = [_entry(endpoints[OLD], old), _entry(endpoints[NEW], new)]
    document = {"anonymous": True}
    if config.exists():
        document = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump(document | {"replicas": replicas}))


async def until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(300):
        while not met():
            await asyncio.sleep(0.005)


async def _none() -> Any:
    raise AssertionError


def _batch(lora: Lora, came: float) -> Batch:
    params = GenerationParams(lora=lora)
    one = Generation(
        request_id="one", prompt_ids=array("i", [1]), max_tokens=8, seed=1, params=params
    )
    return Batch(
        request_id="one",
        generations=[one],
        prompts=1,
        choices=1,
        prompt_tokens=1,
        fingerprint="",
        caller=DEFAULT_CALLER,
        timeout_s=60,
        deadline=came + 60,
    )


@contextlib.asynccontextmanager
async def pool(
    folder: Path, old: Any = 100, new: Any = 100, *, tenants: bool = False, **more: Any
) -> AsyncIterator[Pool]:
    save_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "!"}))
    engines = FakeTriton(tokens=ids_of(folder, OLD), fault=None, step=1), FakeLlmapi()
    engines[1].steps = [build_outputs("ne"), build_outputs(NEW, "stop")]
    engines[1].of_prompt = {FOR_EVER: (build_outputs("ne"), None)}
    config = folder / "c.yaml"
    if tenants:
        write_config(config, *[tenant(*pair) for pair in KEYS.items()])
    async with serving(engines[0]) as first, serving(engines[1]) as second:
        endpoints = {OLD: first, NEW: second}
        _write(config, endpoints, old, new)
        settings = {"config": config, "allow_anonymous": not tenants, "replica_in_flight": PLACES}
        async with running(folder, first, **settings | more) as (client, service, _):
            await until(lambda: len(service.replicas.variants) == 2)
            yield Pool(*engines, endpoints, config, client, service)


async def test_what_a_request_needs_decides_who_takes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with pool(tmp_path) as both:
        assert {await both.says(**ONLY_OLD) for _ in range(8)} == {OLD}
        assert {await both.says(**ONLY_NEW) for _ in range(8)} == {NEW}
        plain = [both.says() for _ in range(40)]
        assert set(await asyncio.gather(*plain)) == {OLD, NEW}
        for refused, param in (
            ({"logit_bias": {"1": 5}}, "logit_bias"),
            (ONLY_OLD | ONLY_NEW, None),
        ):
            answer = await both.ask(**refused)
            assert answer.status_code == 400
            assert param is None or answer.json()["error"]["param"] == param
        # Token ids that cannot be sent as text go to the replica that takes token ids.
        assert await both.says(prompt=[255], max_tokens=3) == OLD
        assert [r.state for r in both.service.replicas] == ["ready", "ready"]
    [told] = [record.message for record in caplog.records if "of 2 kinds" in record.message]
    assert "token mode on 'tensorrt_llm' serves what not all do: log" not in told
    assert "ignore_eos" in told.partition("llmapi mode")[0]
    assert "frequency_penalty" in told.partition("llmapi mode")[2]


async def test_weights_are_changed_while_streams_run(tmp_path: Path) -> None:
    async with pool(tmp_path, 100, 0) as both:
        assert {await both.says() for _ in range(8)} == {OLD}
        assert await both.says(**ONLY_NEW) == NEW  # no other replica supports the parameter
        both.old.fault = "slow"
        begun = [asyncio.create_task(both.says()) for _ in range(PLACES)]
        await until(lambda: both.in_flight(OLD) == PLACES)
        await both.weigh(0, 100)
        # Requests on the old replica take no slots of the new replica.
        held = [asyncio.create_task(both.ask(prompt=FOR_EVER)) for _ in range(PLACES - 1)]
        await until(lambda: both.in_flight(NEW) == PLACES - 1)
        assert {await both.says() for _ in range(8)} == {NEW}
        assert both.in_flight(OLD) == PLACES
        both.old.released.set()
        assert set(await asyncio.gather(*begun)) == {OLD}
        assert await both.says(**ONLY_OLD) == OLD
        for task in held:
            task.cancel()
        await both.weigh(100, 0)
        assert {await both.says() for _ in range(8)} == {OLD}


async def test_a_drained_replica_finishes_what_it_has(tmp_path: Path) -> None:
    async with pool(tmp_path, 100, 0) as both:
        both.old.fault = "slow"
        # The second choice of the last request waits for a slot of the old replica, the only
        # suitable one.
        asked = [asyncio.create_task(both.ask(**ONLY_OLD, n=1)) for _ in range(PLACES - 1)]
        asked.append(asyncio.create_task(both.ask(**ONLY_OLD, n=2)))
        await until(lambda: both.old.reached == PLACES)
        await until(lambda: both.service.admission.waiting == 1)
        await both.weigh({"drain": True}, 100)
        assert await both.says() == NEW
        refused = await both.ask(**ONLY_OLD)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "ignore_eos")
        assert [r.state for r in both.service.replicas] == ["draining", "ready"]
        both.old.released.set()
        answers = [answer.json() for answer in await asyncio.gather(*asked)]
        assert [len(answer["choices"]) for answer in answers] == [1, 1, 1, 2]
        assert {c["text"] for answer in answers for c in answer["choices"]} == {OLD}
        assert [r.state for r in both.service.replicas] == ["drained", "ready"]
        assert {await both.says() for _ in range(12)} == {NEW}
        await both.weigh({"drain": False}, 0)
        assert {await both.says() for _ in range(8)} == {OLD}


@pytest.mark.parametrize("rested", [{"drain": True}, 0])
async def test_of_one_kind_the_rested_one_gets_nothing(tmp_path: Path, rested: Any) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "!"}))
    old, new = (FakeTriton(tokens=ids_of(tmp_path, t), fault=None, step=1) for t in (OLD, NEW))
    config = tmp_path / "c.yaml"
    async with serving(old) as first, serving(new) as second:
        endpoints = {OLD: first, NEW: second}
        _write(config, endpoints, rested, 1)
        settings = {"config": config, "allow_anonymous": True}
        async with running(tmp_path, first, **settings) as (client, service, _):
            await until(lambda: all(replica.ready for replica in service.replicas))
            both = Pool(old, new, endpoints, config, client, service)
            assert {await both.says() for _ in range(12)} == {NEW}
            await both.weigh(1, 1)
            asked = [both.says() for _ in range(40)]
            assert set(await asyncio.gather(*asked)) == {OLD, NEW}


async def test_an_adapter_on_a_drained_disk_is_for_what_came_before(tmp_path: Path) -> None:
    """A request that arrived after the drain waits until another replica has the adapter.

    Earlier requests may still use the adapter of the drained replica.
    """
    save_tokenizer(tmp_path)
    folders, digest, config = Placement(), "f" * 64, tmp_path / "c.yaml"
    lora = Lora(name="zh", task_id=1, nbytes=1, weights=_none, folders=folders.of(digest))
    async with serving(FakeLlmapi()) as first, serving(FakeLlmapi()) as second:
        _write(config, {OLD: first, NEW: second}, {"drain": True}, 1)
        settings = {"config": config, "allow_anonymous": True}
        async with running(tmp_path, first, **settings) as (_, service, _):
            await until(lambda: all(replica.ready for replica in service.replicas))
            drained_at = next(iter(service.replicas)).drained_at
            folders.set({first: {digest: "/there"}}, {}, {}, {})
            waits = AdapterWait(service.replicas, 60)
            await waits.wait_until_available(_batch(lora, drained_at - 1))
            new = asyncio.create_task(waits.wait_until_available(_batch(lora, drained_at)))
            await asyncio.sleep(0)
            assert not new.done()
            folders.set({second: {digest: "/there"}}, {}, {}, {})
            folders.wake()
            async with asyncio.timeout(300):
                await new


async def test_room_that_nobody_has_now_is_not_waited_for(tmp_path: Path) -> None:
    async with pool(tmp_path) as both:
        small = both.service.replicas.variants[0]
        away = VariantRegistry().find_or_add(replace(small.capabilities, max_seq_len=128))
        asked = Options(seed=1, max_tokens=100)
        found = await fit(both.service, [small, away], "x", asked, chat=False)
        assert (set(found.forms), found.max_tokens) == ({small, away}, 63)


async def test_one_that_is_back_while_it_still_finishes_is_told_of_as_it_is(
    tmp_path: Path,
) -> None:
    async with pool(tmp_path) as both:
        both.old.fault = "slow"
        asked = asyncio.create_task(both.ask(**ONLY_OLD))
        await until(lambda: both.old.reached)
        old, new = Target(both.endpoints[OLD]), Target(both.endpoints[NEW])
        await both.service.replicas.configure([new])
        await both.service.replicas.configure([old, new])
        await until(lambda: len(both.service.replicas.variants) == 2)
        health = (await both.client.get("/health/ready")).json()
        assert health["pool"][old.endpoint]["state"] == "ready"
        metrics = generate_latest(both.service.metrics.registry).decode()
        assert metrics.count(f'gateway_replica_ready{{replica="{old.endpoint}"}}') == 1
        both.old.released.set()
        assert (await asked).status_code == 200


async def test_a_name_server_that_is_away_holds_no_drain_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "try again")

    async with pool(tmp_path) as both:
        old, new, replicas = both.endpoints[OLD], both.endpoints[NEW], both.service.replicas
        with monkeypatch.context() as patched:
            patched.setattr(asyncio.get_running_loop(), "getaddrinfo", away, raising=False)
            name = Target("dns:///triton:8001")
            await replicas.configure([Target(old, drain=True), Target(new, 7), name])
            assert [(r.weight, r.drained_at is None) for r in replicas] == [(100, False), (7, True)]
            await replicas.configure([Target(old), name])
            assert [r.endpoint for r in replicas] == [old, new]


async def test_one_that_fails_is_replaced_by_one_without_a_weight(tmp_path: Path) -> None:
    async with pool(tmp_path, 100, 0) as both:
        both.old.fault, both.old.step = "abort", 0
        assert {await both.says() for _ in range(3)} == {NEW}


async def test_an_answer_that_came_as_text_goes_on_nowhere(tmp_path: Path) -> None:
    """An answer that began in llmapi mode is not resumed on a replica in token mode.

    The gateway does not know the answer's token ids, so the other replica would start it again.
    """
    async with pool(tmp_path, 0, 100) as both:
        both.new.steps = [build_outputs("ne"), "Stub process 'm' is not healthy."]
        answer = await both.ask(stream=True)
        assert '"text":"ne"' in answer.text
        assert '"code":"engine_unavailable"' in answer.text
        assert not both.old.requests


async def test_nobody_is_waited_for_who_could_not_take_it(tmp_path: Path) -> None:
    async with pool(tmp_path) as both:
        options = Options(seed=1, ignore_eos=True)
        (only_old,) = (await prepare(both.service, ["x"], options, chat=False)).generations
        old, new = both.service.replicas
        for left in (old, new):
            asked = both.service.replicas.wait_for_other([left], only_old, math.inf)
            found = asyncio.create_task(asked)
            await asyncio.sleep(0)
            assert found.result() is (left is new)


async def test_the_fingerprint_is_of_who_answered(tmp_path: Path) -> None:
    async with pool(tmp_path, 100, 0) as both:
        old = (await both.ask()).json()["system_fingerprint"]
        await both.weigh(0, 100)
        new = (await both.ask()).json()["system_fingerprint"]
        assert old != new
        for asked, fingerprint in (({}, new), (ONLY_OLD, old)):
            stream = (await both.ask(stream=True, **asked)).text
            assert stream.count(fingerprint) == stream.count("system_fingerprint") > 1


async def test_health_tells_of_each(tmp_path: Path) -> None:
    async with pool(tmp_path, 100, 0) as both:
        found = (await both.client.get("/health/ready")).json()["pool"]
        modes = {name: found[both.endpoints[name]] for name in (OLD, NEW)}
        assert [(m["mode"], m["weight"], m["state"]) for m in modes.values()] == [
            ("token", 100, "ready"),
            ("llmapi", 0, "ready"),
        ]
        [model] = (await both.client.get("/v1/models")).json()["data"]
        assert model["modes"] == ["llmapi", "token"]
        await both.weigh({"drain": True}, {"drain": True})
        answer = await both.client.get("/health/ready")
        assert answer.status_code == 503
        assert "is drained" in answer.json()["triton"]
        assert (await both.ask()).status_code == 503


async def test_a_tenant_who_wants_what_few_can_do_starves_nobody(tmp_path: Path) -> None:
    """A flood for one replica's capability starves neither other requests nor other tenants."""
    settings = {"tenant_share": 0.75, "queue_size": 40, "refuse_early": False}
    async with pool(tmp_path, tenants=True, **settings) as both:
        both.old.fault = "slow"
        greedy = [asyncio.create_task(both.ask("greedy", **ONLY_OLD)) for _ in range(30)]
        await until(lambda: both.service.admission.waiting == 27)
        assert both.in_flight(OLD) == 3
        for _ in range(20):
            answer = await both.ask("other", **ONLY_NEW)
            assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, NEW)
        same = asyncio.create_task(both.ask("other", **ONLY_OLD))
        await until(lambda: both.in_flight(OLD) == 4)
        # The old replica is full now, so requests of both tenants that fit both replicas go to the
        # new one.
        for name in KEYS:
            plain = [both.ask(name) for _ in range(5)]
            texts = {a.json()["choices"][0]["text"] for a in await asyncio.gather(*plain)}
            assert texts == {NEW}
        assert both.in_flight(OLD) == 4
        both.old.released.set()
        assert {a.status_code for a in await asyncio.gather(*greedy, same)} == {200}
        assert both.service.admission.in_flight == 0


async def test_a_share_of_few_replicas_is_of_all_their_places(tmp_path: Path) -> None:
    """A tenant's share counts all slots of the suitable replicas, also those that others hold."""
    async with pool(tmp_path, tenants=True, tenant_share=0.75) as both:
        both.old.fault = "slow"
        anywhere = [
            asyncio.create_task(both.ask("other", prompt=FOR_EVER, stream=True)) for _ in range(4)
        ]
        await until(lambda: both.in_flight(OLD) == both.in_flight(NEW) == PLACES // 2)
        only_old = [asyncio.create_task(both.ask("greedy", **ONLY_OLD)) for _ in range(3)]
        await until(lambda: both.service.admission.waiting == 1)
        assert both.in_flight(OLD) == PLACES
        both.old.released.set()
        assert {a.status_code for a in await asyncio.gather(*only_old)} == {200}
        for task in anywhere:
            task.cancel()
        await asyncio.wait(anywhere)
