"""LoRA serving under evictions, restarts and updates: no wrong answer and no lost adapter."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import redis

from adapters.adapter import MODULE_NAMES, Converted
from adapters.modules import module_sizes
from ops.commands.up import DEMO_MODEL
from tests.support.gateway_process import GatewayProcess
from tests.support.generated_adapters import (
    PROMPT,
    TOKENS,
    base_model,
    convert_folder,
    expected_answers,
    write_adapter,
)
from tests.support.local_stack import Stack, Up
from tests.support.metrics import metric
from triton_repo.cpu_executor import engine

ADAPTERS = 100
HELD_BY_ENGINE = 8
CLIENTS = 64
REQUESTS = 600
REQUESTS_UNDER_FIRE = 1000
FOLLOW_UPS = 200
HANGS_AFTER_S = 300


@dataclass(frozen=True)
class Many:
    """A stack with more adapters than its engine holds. `answers` is by name; "demo" is the base
    model.
    """

    up: Up
    folders: dict[str, Path]
    answers: dict[str, str]

    @property
    def stack(self) -> Stack:
        return self.up.state()

    @property
    def admin(self) -> dict[str, str]:
        return {"authorization": f"Bearer {(self.up.state_dir / 'admin_key').read_text()}"}


def _used_bytes(adapter: Converted, engine_dir: Path) -> int:
    base = base_model(engine_dir)
    return sum(
        2 * rank * sum(module_sizes(MODULE_NAMES[module], base))
        for module, _, rank in adapter.config_rows()
    )


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Many]:
    folder = tmp_path_factory.mktemp("many")
    engine_dir = engine.build(
        DEMO_MODEL,
        folder / "engine",
        gather_generation_logits=True,
        lora_target_modules=engine.LLAMA_LORA_MODULES,
    )
    # Some seeds produce the same text. Only adapters with different answers are used.
    made = [write_adapter(folder / f"s{n}", DEMO_MODEL, seed=n) for n in range(ADAPTERS * 5 // 4)]
    tensors = [convert_folder(path, engine_dir) for path in made]
    by_answer = dict(zip(expected_answers(engine_dir, DEMO_MODEL, tensors), made, strict=True))
    chosen = [(answer, path) for answer, path in by_answer.items() if answer][:ADAPTERS]
    answers = {f"a{n}": answer for n, (answer, _) in enumerate(chosen)}
    folders = {f"a{n}": path for n, (_, path) in enumerate(chosen)}
    assert len(folders) == ADAPTERS
    cache = HELD_BY_ENGINE * _used_bytes(tensors[0], engine_dir)
    parameters = {
        "lora_cache_host_memory_bytes": cache,
        "lora_cache_max_adapter_size": 2,
        "lora_cache_optimal_adapter_size": 2,
    }
    flags = [f"--parameter={name}={value}" for name, value in parameters.items()]
    with Up(folder, "--port", "0", "--restart", *flags) as up:
        up.wait_ready()
        many = Many(up, folders, answers)
        asyncio.run(_register(many))
        yield many
        up.remember_processes()
        up.send(signal.SIGTERM)
        assert up.wait() == 0, up.stderr
        up.assert_nothing_is_left()


async def _register(many: Many) -> None:
    async with httpx.AsyncClient(base_url=many.stack.gateway, timeout=60) as client:
        for name, folder in many.folders.items():
            files = [("file", (path.name, path.read_bytes())) for path in folder.iterdir()]
            response = await client.post(
                "/v1/adapters",
                data={"name": name, "base": "demo"},
                files=files,
                headers=many.admin,
            )
            assert response.status_code == 201, response.text


@asynccontextmanager
async def _client(gateway: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=gateway, timeout=60, limits=limits) as client:
        yield client


async def _ask(client: httpx.AsyncClient, model: str) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    return await client.post("/v1/completions", json=body)


def _text(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


async def _load(
    many: Many, requests: int, seed: int, outcome: Counter[str] | None = None
) -> Counter[str]:
    """Ask for all adapters with `CLIENTS` clients, until each request is answered correctly.

    Refused requests are repeated. Return the number of correct answers ("right") and of refusals by
    status.
    """
    jobs = list(many.folders) * (requests // ADAPTERS)
    random.Random(seed).shuffle(jobs)
    outcome = Counter() if outcome is None else outcome
    async with _client(many.stack.gateway) as client:

        async def work() -> None:
            while jobs:
                name = jobs.pop()
                response = await _ask(client, name)
                if response.status_code == 200:
                    assert _text(response) == many.answers[name], name
                    outcome["right"] += 1
                else:
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
                    outcome[str(response.status_code)] += 1
                    jobs.append(name)
                    await asyncio.sleep(0.5)

        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(work())
    return outcome


@pytest.mark.slow
async def test_a_hundred_adapters_over_a_cache_of_eight(many: Many) -> None:
    url = many.stack.gateway + "/metrics"
    assert await _load(many, REQUESTS, seed=1) == {"right": REQUESTS}
    first = metric(url, "gateway_lora_cold_sends_total", cause="first_use")
    again = metric(url, "gateway_lora_cold_sends_total", cause="evicted")
    assert first == ADAPTERS
    assert again > ADAPTERS
    in_vain = metric(url, "gateway_lora_cold_sends_total", cause="refused")
    # The first request of each client is sent before the engine has refused any. If the gateway did
    # not lower its limit after a refusal, there would be some 400 refusals.
    assert in_vain < 2 * CLIENTS, "the gateway learns how many adapters fit at once"


@pytest.mark.slow
async def test_a_hundred_requests_for_a_cold_adapter_send_it_once(many: Many) -> None:
    url = many.stack.gateway + "/metrics"
    # Requests for eight other adapters first evict this one.
    async with _client(many.stack.gateway) as client:
        for name in [f"a{n}" for n in range(1, HELD_BY_ENGINE + 1)]:
            await _ask(client, name)
        before = metric(url, "gateway_lora_cold_sends_total")
        answers = await asyncio.gather(*[_ask(client, "a0") for _ in range(100)])
    assert {_text(answer) for answer in answers} == {many.answers["a0"]}
    assert metric(url, "gateway_lora_cold_sends_total") == before + 1


@pytest.mark.slow
async def test_a_mixed_batch_equals_each_alone(many: Many) -> None:
    names = ["demo", "a3", "a5", "demo", "a3", "a5"]
    async with _client(many.stack.gateway) as client:
        alone = {name: _text(await _ask(client, name)) for name in dict.fromkeys(names)}
        mixed = [
            _text(answer) for answer in await asyncio.gather(*[_ask(client, n) for n in names])
        ]
    assert mixed == [alone[name] for name in names]


@pytest.mark.slow
async def test_triton_and_redis_killed_under_load(many: Many) -> None:
    outcome: Counter[str] = Counter()

    async def kill(name: str, after: int) -> None:
        while outcome["right"] < after:
            await asyncio.sleep(0.01)
        os.kill(many.stack.pids[name], signal.SIGKILL)

    async with asyncio.timeout(600):
        await asyncio.gather(
            _load(many, REQUESTS_UNDER_FIRE, 2, outcome), kill("redis", 200), kill("triton", 600)
        )
    assert outcome["right"] == REQUESTS_UNDER_FIRE
    assert set(outcome) == {"right", "503"}
    await _wait_ready(many)
    assert await _load(many, FOLLOW_UPS, seed=3) == {"right": FOLLOW_UPS}


@pytest.mark.slow
async def test_nothing_is_lost_when_redis_loses_everything(many: Many) -> None:
    with redis.Redis.from_url(many.stack.redis) as client:
        client.flushall()
    assert await _load(many, FOLLOW_UPS, seed=4) == {"right": FOLLOW_UPS}
    async with _client(many.stack.gateway) as client:
        listed = (await client.get("/v1/adapters", headers=many.admin)).json()["data"]
    assert {record["name"] for record in listed} >= set(many.folders)


async def _wait_ready(many: Many) -> None:
    async with _client(many.stack.gateway) as client, asyncio.timeout(HANGS_AFTER_S):
        while True:
            response = await client.get("/health/ready")
            if response.status_code == 200 and response.json().get("redis") == "up":
                return
            await asyncio.sleep(0.1)


@pytest.fixture
def second_gateway(many: Many, tmp_path: Path) -> Iterator[str]:
    """Yield the URL of another `gateway serve` on the same Triton and Redis, with its own disk."""
    stack = many.stack
    key = "the-admin-key-of-the-second-gateway"
    with GatewayProcess(tmp_path, stack, redis_url=stack.redis, admin_key=key) as gateway:
        yield gateway.url


@pytest.mark.slow
async def test_an_update_under_load_is_old_or_new_on_both_gateways(
    many: Many, second_gateway: str
) -> None:
    """Check that the old version is never served again after the new one.

    Redis alone must be enough for an adapter that another gateway added.
    """
    old, new = many.answers["a10"], many.answers["a11"]
    gateways = [many.stack.gateway, second_gateway]
    seen = {gateway: Counter[str]() for gateway in gateways}
    done = asyncio.Event()

    async def watch(gateway: str) -> None:
        async with _client(gateway) as client:
            while not done.is_set():
                may_be_old = not seen[gateway][new]
                answer = _text(await _ask(client, "updated"))
                assert answer in ((old, new) if may_be_old else (new,))
                seen[gateway][answer] += 1

    async def until_all_have_seen(answer: str) -> None:
        while not all(counts[answer] >= 10 for counts in seen.values()):
            await asyncio.sleep(0.01)

    async with _client(gateways[0]) as client, _client(second_gateway) as other:
        await _add(client, many, "a10")
        await _until_status(other, 200)
        async with asyncio.timeout(HANGS_AFTER_S), asyncio.TaskGroup() as group:
            for gateway in gateways * 6:
                group.create_task(watch(gateway))
            await until_all_have_seen(old)
            await _add(client, many, "a11")
            # The gateway that received the upload serves the new version as soon as it has
            # responded.
            assert _text(await _ask(client, "updated")) == new
            await until_all_have_seen(new)
            done.set()
        removed = await client.delete("/v1/adapters/updated", headers=many.admin)
        assert removed.status_code == 200
        await _until_status(other, 404)


async def _until_status(client: httpx.AsyncClient, status: int) -> None:
    async with asyncio.timeout(HANGS_AFTER_S):
        while (await _ask(client, "updated")).status_code != status:
            await asyncio.sleep(0.02)


async def _add(client: httpx.AsyncClient, many: Many, content: str) -> None:
    files = [("file", (p.name, p.read_bytes())) for p in many.folders[content].iterdir()]
    data = {"name": "updated", "base": "demo"}
    response = await client.post("/v1/adapters", data=data, files=files, headers=many.admin)
    assert response.status_code == 201, response.text
