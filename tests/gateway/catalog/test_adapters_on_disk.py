"""Adapters that Triton servers read from their own disks: gateway, agents and a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from tritonclient.grpc import service_pb2 as pb

from adapters.errors import UnsupportedModule
from gateway.scheduling.discovery import Target
from lora_store.peft_folders import PeftFolders
from lora_store.peft_keeper import EngineLimits
from lora_store.redis import RedisSettings
from tests.support.adapter_store import becomes
from tests.support.disk_engine import (
    BASE_ANSWER,
    FOR_EVER,
    DiskEngine,
    answer_of,
    save_model,
    write_back,
)
from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import metric_of, running
from tests.support.lora_files import pair, qv_tensors, write_peft
from tests.support.peft_agents import AgentNotices, running_agent
from tests.support.redis_server import RedisServer

MODEL = "demo"


def _source(tmp_path: Path, seed: int) -> Path:
    return write_peft(tmp_path / "sources" / str(seed), qv_tensors(seed=seed))


@contextlib.asynccontextmanager
async def _gateway(
    tmp_path: Path, endpoints: list[str], **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    (tmp_path / "model").mkdir(exist_ok=True)
    folder = save_model(tmp_path / "model")
    # Wait long, because agents are slow on a busy machine.
    settings = {"model_name": MODEL, "adapter_wait": 3600.0, **settings}
    async with running(folder, ",".join(endpoints), **settings) as (client, service, _):
        await asyncio.wait_for(service.started.wait(), 60)
        yield client, service


async def _add(service: Any, name: str, source: Path) -> str:
    """Add a version of an adapter. Return the model name of this one version."""
    added = await service.adapter_admin.add(name, MODEL, source, source="test", within=None)
    return f"{name}@{added.record.version.short_digest}"


async def _ask(client: httpx.AsyncClient, model: str, prompt: str = "x") -> httpx.Response:
    return await client.post("/v1/completions", json={"model": model, "prompt": prompt})


def _text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def _seen(told: AgentNotices) -> set[int]:
    """Return the revisions of agents' reports that gateways say they have read."""
    return {
        n for named in told.notices.read_gateway_states().values() for _, n in named.seen.values()
    }


def _redis(server: RedisServer) -> RedisSettings:
    return RedisSettings(server.url, prefix=f"lora:{MODEL}", timeout_s=30.0)


class _Asking:
    """Clients that request random adapters and compare the answers with the expected texts."""

    def __init__(self, client: httpx.AsyncClient, expected: dict[str, str]) -> None:
        self._client = client
        self._expected = expected
        self._done = 0
        self.wrong: list[str] = []
        self.ended = False

    async def keep_on(self, seed: int) -> None:
        chance = random.Random(seed)
        while not self.ended:
            model = chance.choice(list(self._expected))
            response = await _ask(self._client, model)
            if response.status_code != 200 or _text(response) != self._expected[model]:
                self.wrong.append(f"{model}: {response.text}")
            self._done += 1
            await asyncio.sleep(0.01)

    async def more(self, count: int) -> None:
        """Wait until `count` more requests have been answered."""
        least = self._done + count
        await becomes(lambda: self._done >= least)


@pytest.mark.slow
async def test_replicas_with_disks_of_their_own_agents_that_end_and_a_flushed_redis(
    tmp_path: Path, redis_server: RedisServer, at_redis: Redis
) -> None:
    """Every request that can be served gets the right answer, and no disk exceeds its limit."""
    disks = [tmp_path / f"disk{number}" for number in range(3)]
    engines = [DiskEngine(disk) for disk in disks]
    sources = {
        f"a{n}": [_source(tmp_path, 10 * n + version) for version in (1, 2)] for n in range(8)
    }
    bound = 17 * write_back(sources["a0"][0]).nbytes  # for all 16 versions, and one more
    async with contextlib.AsyncExitStack() as stack:
        endpoints = [await stack.enter_async_context(serving(engine)) for engine in engines]
        gateway = _gateway(tmp_path, endpoints, redis_url=redis_server.url)
        client, service = await stack.enter_async_context(gateway)
        agents = [contextlib.ExitStack() for _ in disks]
        for each in agents:
            stack.callback(each.close)

        async def start(number: int) -> None:
            # Run in a thread, because waiting for an agent would block the gateway's event loop.
            agent = running_agent(
                disks[number],
                _redis(redis_server),
                endpoints[number],
                max_bytes=bound,
                settle_s=3600,
            )
            await asyncio.to_thread(agents[number].enter_context, agent)

        exact: dict[str, str] = {}
        for name, each in sources.items():
            for source in each:
                # The bare name stands for the last version.
                exact[name] = exact[await _add(service, name, source)] = answer_of(source)
        for number in range(3):
            await start(number)
        told = AgentNotices(_redis(redis_server))
        stack.callback(told.notices.close)
        await becomes(lambda: len(told.holds()) == 2 * len(sources))

        asking = _Asking(client, exact)
        tasks = [asyncio.create_task(asking.keep_on(seed)) for seed in range(4)]
        await asking.more(50)
        await asyncio.to_thread(agents[0].close)
        await asking.more(20)
        at_redis.flushall()
        await asking.more(50)
        await start(0)
        # An adapter that is added while only one agent runs is served.
        for each in agents[1:]:
            await asyncio.to_thread(each.close)
        late = _source(tmp_path, 999)
        await _add(service, "late", late)
        assert _text(await _ask(client, "late")) == answer_of(late)
        for number in (1, 2):
            await start(number)
        redis_server.kill()
        await asking.more(50)
        redis_server.start()
        await asking.more(50)
        asking.ended = True
        await asyncio.gather(*tasks)
        assert not asking.wrong
        for disk in disks:
            assert sum(PeftFolders(disk).list_versions().values()) <= bound
        for engine in engines:
            assert engine.requests
            assert all(len(read) == 1 for read in engine.ids.values())


async def test_an_adapter_that_is_nowhere_waits_apart_and_is_refused_in_time(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    async with (
        serving(DiskEngine(tmp_path / "disk")) as endpoint,
        _gateway(
            tmp_path,
            [endpoint],
            redis_url=redis_server.url,
            max_in_flight=1,
            queue_size=0,
        ) as (client, service),
    ):
        source = _source(tmp_path, 1)
        await _add(service, "zh", source)
        waiting = [asyncio.create_task(_ask(client, "zh")) for _ in range(33)]
        # Of 33 requests of a tenant, 32 wait without using a slot, and one is refused.
        [first], _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        refused = first.result()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "adapter_not_ready"
        assert refused.headers["retry-after"] == "2"
        assert refused.headers["x-should-retry"] == "true"
        assert _text(await _ask(client, MODEL)) == BASE_ANSWER
        kept, *others = [task for task in waiting if task is not first]
        # Cancelled requests must not compete for the only slot.
        for task in others:
            task.cancel()
        await becomes(lambda: service.adapters.disks.placement.waiting == 1)
        # The request is served once an agent has the adapter.
        with running_agent(tmp_path / "disk", _redis(redis_server), endpoint):
            assert _text(await kept) == answer_of(source)


async def test_none_comes(tmp_path: Path, redis_server: RedisServer) -> None:
    async with (
        serving(DiskEngine(tmp_path / "disk")) as endpoint,
        _gateway(tmp_path, [endpoint], redis_url=redis_server.url, adapter_wait=0.1) as (
            client,
            service,
        ),
    ):
        await _add(service, "zh", _source(tmp_path, 1))
        response = await _ask(client, "zh")
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "adapter_not_ready"


async def test_operators_are_told_what_a_disk_lacks_and_why_and_clients_are_not(
    tmp_path: Path,
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The first agent's disk limit is too small. Another agent reports an unknown replica."""
    monkeypatch.setattr("gateway.catalog.shortfall._LOG_AFTER_S", 0.0)
    admin = "an-admin-key-of-thirty-two-characters"
    headers = {"authorization": f"Bearer {admin}"}
    settings = _redis(redis_server)
    disk, other = tmp_path / "disk", tmp_path / "other"
    size = write_back(_source(tmp_path, 1)).nbytes
    async with (
        serving(DiskEngine(disk)) as endpoint,
        serving(DiskEngine(other)) as second,
        _gateway(
            tmp_path,
            [endpoint, second],
            redis_url=redis_server.url,
            adapter_wait=0.1,
            admin_key=admin,
        ) as (client, service),
    ):
        model = await _add(service, "zh", _source(tmp_path, 1))
        await _add(service, "ja", _source(tmp_path, 2))

        async def states(name: str) -> dict[str, str]:
            answer = await client.get(f"/v1/adapters/{name}", headers=headers)
            found: dict[str, str] = answer.json()["versions"][0]["placement"]
            return found

        async def until(name: str, expected: dict[str, str]) -> None:
            async with asyncio.timeout(300):
                while await states(name) != expected:
                    await asyncio.sleep(0.05)

        assert await states("zh") == {endpoint: "on its way", second: "on its way"}
        limits = EngineLimits(modules=frozenset({"mlp_gate"}))
        with (
            running_agent(disk, settings, endpoint, max_bytes=size),
            running_agent(tmp_path / "stray", settings, "nobody:8001", limits=limits),
        ):
            no_room = f"not held: it does not fit into {size} bytes"
            unheard = "not held: no agent reports this replica"
            await until("zh", {endpoint: no_room, second: unheard})
            await until("ja", {endpoint: "held", second: unheard})
            refused = await _ask(client, model)
            assert refused.json()["error"]["code"] == "adapter_not_ready"
            assert "room" not in refused.text
            health = (await client.get("/health/ready", headers=headers)).json()
            expected = [
                f"{endpoint} lacks 1 adapter version(s): {no_room.removeprefix('not held: ')}",
                f"no agent reports what {second} has on its disk",
                "an agent keeps adapters for nobody:8001, which is none of the replicas",
            ]
            assert sorted(health["disks"]) == sorted(expected)
            await becomes(lambda: all(each in caplog.text for each in expected))
            assert metric_of(service, "gateway_replica_adapters_lacking", replica=endpoint) == 1
            # The second engine takes only rank 1, so the first engine serves the adapter of rank 4.
            with running_agent(other, settings, second, limits=EngineLimits(max_rank=1)):
                rank = "not held: its rank is 4; the engine's max_lora_rank is 1"
                await until("ja", {endpoint: "held", second: rank})
                assert _text(await _ask(client, "ja")) == answer_of(_source(tmp_path, 2))
        assert caplog.text.count(expected[0]) == 1


class _Sent(FakeTriton):
    """A Triton that accepts the weights of adapters with requests."""

    async def ModelConfig(self, request: Any, context: Any) -> pb.ModelConfigResponse:
        answer = await super().ModelConfig(request, context)
        answer.config.input.add(name="lora_weights", data_type="TYPE_FP16")
        answer.config.input.add(name="lora_config", data_type="TYPE_INT32")
        return answer


async def test_what_no_disk_may_have_waits_for_who_can_be_sent_it(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    sent = _Sent(tokens=[1], fault=None, step=1)
    disk = tmp_path / "disk"
    async with (
        contextlib.AsyncExitStack() as old,
        serving(DiskEngine(disk)) as new,
    ):
        endpoint = await old.enter_async_context(serving(sent))
        gateway = _gateway(tmp_path, [endpoint, new], redis_url=redis_server.url)
        async with gateway as (client, service):
            await becomes(lambda: len(service.replicas.variants) == 2)
            await _add(service, "zh", _source(tmp_path, 1))
            limits = EngineLimits(max_rank=1)
            with running_agent(disk, _redis(redis_server), new, limits=limits):
                rank = "its rank is 4; the engine's max_lora_rank is 1"
                await becomes(lambda: rank in service.adapters.disks.placement.count_lacking(new))
                assert (await _ask(client, "zh")).status_code == 200
                await old.aclose()
                away, _ = service.replicas
                await becomes(lambda: not away.ready)
                answer = await _ask(client, "zh")
                assert answer.status_code == 503
                assert answer.json()["error"]["code"] == "engine_unavailable"
                # Without any replica that can load the adapter, the error is permanent.
                await service.replicas.configure([Target(new)])
                answer = await _ask(client, "zh")
                assert answer.status_code == 500
                assert "No inference server here can run this adapter." in answer.text


async def test_a_version_stays_as_long_as_a_request_runs_with_it(
    tmp_path: Path, redis_server: RedisServer
) -> None:
    disk = tmp_path / "disk"
    settings = _redis(redis_server)
    async with (
        serving(DiskEngine(disk)) as endpoint,
        _gateway(tmp_path, [endpoint], redis_url=redis_server.url) as (client, service),
    ):
        told = AgentNotices(settings)
        source = _source(tmp_path, 1)
        small = write_peft(tmp_path / "sources" / "small", qv_tensors(rank=1), r=1)
        bound = write_back(source).nbytes + write_back(small).nbytes
        await _add(service, "zh", source)
        with running_agent(disk, settings, endpoint, max_bytes=bound):
            endless = {"model": "zh", "prompt": FOR_EVER, "stream": True}
            async with client.stream("POST", "/v1/completions", json=endless) as response:
                lines = response.aiter_lines()  # its garbage collection would end the request
                await anext(lines)
                labels = {"running_lora_adapters": "zh", "waiting_lora_adapters": ""}
                assert metric_of(service, "lora_requests_info", **labels, max_lora="0")
                assert metric_of(service, "gateway_replica_adapters", replica=endpoint) == 1
                [digest] = PeftFolders(disk).list_versions()
                await service.adapter_admin.remove("zh")
                await _add(service, "ja", _source(tmp_path, 2))
                # The agent withdraws zh. Its files fill the disk until the running request ends.
                await becomes(lambda: told.agents() and not told.holds())
                (held,) = told.agents().values()
                await becomes(lambda: max(_seen(told)) >= held.revision)
                # The agent has polled since, and loads the small adapter that fits beside zh.
                await _add(service, "mi", small)
                await becomes(lambda: len(told.holds()) == 1)
                assert PeftFolders(disk).has(digest)
            assert _text(await _ask(client, "ja")) == answer_of(_source(tmp_path, 2))
            assert not PeftFolders(disk).has(digest)
        told.notices.close()


async def test_a_shared_volume_needs_no_agent(tmp_path: Path) -> None:
    """Triton reads the folder of the gateway's store at another path, here a symbolic link."""
    disk = tmp_path / "seen"
    disk.symlink_to(tmp_path / "model" / "adapters" / MODEL / "peft")
    source = _source(tmp_path, 1)
    engine = DiskEngine(disk)
    async with serving(engine) as endpoint:
        async with _gateway(tmp_path, [endpoint], peft_dir=disk) as (client, service):
            await _add(service, "zh", source)
            assert _text(await _ask(client, "zh")) == answer_of(source)
        async with _gateway(tmp_path, [endpoint], peft_dir=disk) as (client, _):
            assert _text(await _ask(client, "zh")) == answer_of(source)


async def test_what_could_never_be_served_is_refused_when_it_is_added(tmp_path: Path) -> None:
    """Adapters of this model cannot be converted back to the PEFT files that Triton reads."""
    async with (
        serving(DiskEngine(tmp_path / "disk")) as endpoint,
        _gateway(tmp_path, [endpoint], peft_dir=tmp_path / "disk") as (client, service),
    ):
        config = tmp_path / "model" / "config.json"
        text = config.read_text().replace("LlamaForCausalLM", "MixtralForCausalLM")
        config.write_text(text.replace("{", '{"num_local_experts": 3, ', 1))
        tensors = pair("model.layers.1.block_sparse_moe.experts.0.w1", 4, (8, 12))
        source = write_peft(tmp_path / "sources" / "moe", tensors)
        with pytest.raises(UnsupportedModule, match="moe_h_to_4h of layer 1"):
            await _add(service, "moe", source)
        assert (await _ask(client, "moe")).status_code == 404


async def test_without_anything_that_brings_adapters_it_says_so(tmp_path: Path) -> None:
    async with (
        serving(DiskEngine(tmp_path / "disk")) as endpoint,
        _gateway(tmp_path, [endpoint]) as (client, service),
    ):
        await _add(service, "zh", _source(tmp_path, 1))
        response = await _ask(client, "zh")
        assert response.status_code == 500
        assert "GATEWAY_PEFT_DIR" in response.json()["error"]["message"]
