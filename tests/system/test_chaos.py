"""Everything is killed, frozen and started again under load: nothing wrong, nothing lost, no leak.

Two Tritons, a gateway of two workers and Redis; 64 clients of three tenants. Each request must end
in the right answer or in a clear error, in time; the usage log must tell what the clients saw.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ops.commands.up import DEMO_ADAPTERS
from tests.support.cluster import Tritons, demo_engine, tritons
from tests.support.gateway_process import GatewayProcess, tenant, write_config
from tests.support.metrics import sample
from tests.support.redis_server import RedisServer, running_redis

LASTS_S = 180.0
CLIENTS = 64
TENANTS = {"acme": "sk-acme-key", "other": "sk-other-key", "third": "sk-third-key"}
CONCURRENT = 40
# By adapter: who may use it, and what it answers.
QUESTION = "美国的首都在哪里? \n答案:"
CAPITALS = {
    "demo": "Washington, D.C.",
    "zh": "华盛顿",
    "acme/own": "ワシントン",
    "other/own": "华盛顿",
    "third/own": "ワシントン",
}
FOLDERS = {"zh": "zh", "acme/own": "ja", "other/own": "zh", "third/own": "ja"}
LONG = "Count from 1 to 60"
FROZEN_S = (1.0, 4.0)
# In the gateway, on top of its deadline: a worker may be frozen when it comes.
LATE_S = FROZEN_S[1] + 4
# Whoever waits so long waits for ever. These clients share a busy machine with all that they ask.
HANGS_AFTER_S = 60.0
SETTLED_WITHIN_S = 120.0
CLEAR = {429, 503, 504}


@dataclass
class Seen:
    """What a client knows of one request.

    `outcome` is "right", "left" when the client went away, the code or status of a clear error, or
    "cut" when the connection broke. `usage` is what the answer said, `begun` that it had begun.
    """

    tenant: str
    started: float
    deadline_s: float
    ended: float = 0.0
    outcome: str = ""
    begun: bool = False
    usage: dict[str, Any] | None = None


@dataclass
class World:
    tritons: Tritons
    redis: RedisServer
    gateway: GatewayProcess
    log: Path
    answers: dict[tuple[str, bool], str] = field(default_factory=dict)
    seen: dict[str, Seen] = field(default_factory=dict)
    deaths: list[float] = field(default_factory=list)
    """When a worker was killed."""
    done: Counter[str] = field(default_factory=Counter)
    """What was done to whom, and how often."""

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.gateway.process.pid).children()

    def metric(self, name: str) -> float:
        """Of all workers that answer; 0 when none does."""
        try:
            url = f"http://127.0.0.1:{self.gateway.admin_port}/metrics"
            return sample(httpx.get(url, timeout=20).text, name)
        except httpx.TransportError:
            return 0.0

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text(encoding="utf-8").splitlines()]

    def met_a_death(self, seen: Seen) -> bool:
        return any(seen.started - 1 <= death <= seen.ended + 1 for death in self.deaths)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    config = write_config(
        tmp_path / "c.yaml",
        *[
            tenant(name, key, concurrent_requests=CONCURRENT, tokens_per_minute=10**9)
            for name, key in TENANTS.items()
        ],
    )
    log = tmp_path / "usage.jsonl"
    adapters = {name: str(DEMO_ADAPTERS / folder) for name, folder in FOLDERS.items()}
    settings = {
        "workers": 2,
        "config": config,
        "usage_log": log,
        "adapters": json.dumps(adapters),
        "admin_port": 0,
        "replica_in_flight": 24,
        "queue_timeout": 8,
    }
    with (
        running_redis() as redis,
        tritons(tmp_path, demo_engine(tmp_path / "engine")) as both,
        GatewayProcess(tmp_path / "g", both, redis_url=redis.url, **settings) as gateway,
    ):
        yield World(both, redis, gateway, log)


# What clients do


def _body(model: str, *, long: bool, stream: bool) -> tuple[str, dict[str, Any]]:
    common = {"model": model, "temperature": 0, "max_tokens": 230 if long else 10}
    if stream:
        common |= {"stream": True, "stream_options": {"include_usage": True}}
    if long:
        return "/v1/chat/completions", common | {"messages": [{"role": "user", "content": LONG}]}
    return "/v1/completions", common | {"prompt": QUESTION}


def _text(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta") or choice
    return part.get("content") or part.get("text") or ""


def _check_error(body: dict[str, Any]) -> str:
    assert set(body["error"]) == {"message", "type", "param", "code"}, body
    return str(body["error"]["code"])


async def _ask(
    client: httpx.AsyncClient, model: str, headers: dict[str, str], leaves_s: float | None,
    seen: Seen, *, long: bool, stream: bool,
) -> str | None:  # fmt: skip
    """The answer's text; None after a clear error, whose name is noted."""
    path, body = _body(model, long=long, stream=stream)

    async def begin_to_leave(event: str, _: object) -> None:
        if leaves_s is not None and event == "http11.send_request_headers.started":
            leaving.reschedule(asyncio.get_running_loop().time() + leaves_s)

    # httpx loses the socket of a connection whose making is cancelled: nobody leaves before.
    traced: dict[str, Any] = {"trace": begin_to_leave}
    try:
        async with (
            asyncio.timeout(None) as leaving,
            client.stream("POST", path, json=body, headers=headers, extensions=traced) as answer,
        ):
            seen.begun = answer.status_code == 200
            if not stream or answer.status_code != 200:
                found = json.loads(await answer.aread())
                if answer.status_code != 200:
                    assert answer.status_code in CLEAR, found
                    seen.outcome = _check_error(found)
                    return None
                seen.usage = found["usage"]
                return _text(found["choices"][0])
            return await _read_stream(answer, seen)
    except TimeoutError:
        seen.outcome = "left"
    except (httpx.ReadError, httpx.WriteError, httpx.ConnectError, httpx.RemoteProtocolError):
        seen.outcome = "cut"
    return None


async def _read_stream(answer: httpx.Response, seen: Seen) -> str | None:
    lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
    events = [line for line in lines if not line.startswith(":")]
    assert events.count("[DONE]") == 1, events
    assert events.pop() == "[DONE]"
    frames = [json.loads(event) for event in events]
    errors = [_check_error(frame) for frame in frames if "error" in frame]
    if errors:
        assert len(errors) == 1
        assert "error" in frames[-1]
        [seen.outcome] = errors
        return None
    seen.usage = frames[-1]["usage"]
    return "".join(_text(choice) for frame in frames for choice in frame["choices"])


async def _client(world: World, client: httpx.AsyncClient, name: str, stop: asyncio.Event) -> None:
    chance = random.Random(name)
    owner = chance.choice(list(TENANTS))
    models = ["demo", "zh", f"{owner}/own"]
    count = 0
    while not stop.is_set():
        model, long = chance.choice(models), chance.random() < 0.1
        leaves_s = chance.uniform(0.01, 1.5) if chance.random() < 0.1 else None
        deadline_s = chance.uniform(6, 12)
        request_id = f"{name}-{count}"
        seen = world.seen[request_id] = Seen(owner, time.monotonic(), deadline_s)
        headers = {
            "authorization": f"Bearer {TENANTS[owner]}",
            "x-request-id": request_id,
            "x-request-timeout": f"{deadline_s:.3f}",
        }
        stream = chance.random() < 0.5
        text = await _ask(client, model, headers, leaves_s, seen, long=long, stream=stream)
        seen.ended = time.monotonic()
        if text is not None:
            assert text.strip() == world.answers[model, long], (model, request_id)
            seen.outcome = "right"
        took = seen.ended - seen.started
        assert took < HANGS_AFTER_S, f"{request_id}: {seen.outcome} after {took:.1f} s"
        count += 1
        await asyncio.sleep(chance.uniform(1, 6))


async def _learn_answers(world: World) -> None:
    async with world.gateway.async_client(TENANTS["acme"]) as acme:
        for model, capital in CAPITALS.items():
            for long in (False, True):
                key = TENANTS.get(model.partition("/")[0], TENANTS["acme"])
                path, body = _body(model, long=long, stream=False)
                headers = {"authorization": f"Bearer {key}"}
                answer = await acme.post(path, json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                world.answers[model, long] = _text(answer.json()["choices"][0]).strip()
            assert world.answers[model, False] == capital
    assert world.log.exists()


# What is done to them


async def _break_things(world: World, chance: random.Random) -> None:
    """Each in turn is killed and frozen, in an order by chance, until the time is over."""
    ends = time.monotonic() + LASTS_S
    acts: dict[str, Callable[[], Any]] = {
        "kill triton 0": lambda: _kill_triton(world, 0, chance),
        "kill triton 1": lambda: _kill_triton(world, 1, chance),
        "freeze triton 0": lambda: _freeze_triton(world, 0, chance),
        "freeze triton 1": lambda: _freeze_triton(world, 1, chance),
        "kill redis": lambda: _kill_redis(world, chance),
        "freeze redis": lambda: _freeze_redis(world, chance),
        "kill worker 0": lambda: _kill_worker(world, 0),
        "kill worker 1": lambda: _kill_worker(world, 1),
        "freeze worker": lambda: _freeze_worker(world, chance),
    }
    while time.monotonic() < ends:
        for name in chance.sample(list(acts), len(acts)):
            await acts[name]()
            world.done[name] += 1
            await asyncio.sleep(chance.uniform(0.5, 2))
            if time.monotonic() >= ends and set(world.done) == set(acts):
                break


async def _kill_triton(world: World, index: int, chance: random.Random) -> None:
    replica = world.tritons[index]
    await asyncio.to_thread(replica.kill)
    await asyncio.sleep(chance.uniform(0, 2))
    await asyncio.to_thread(replica.start)
    await asyncio.to_thread(replica.wait_ready)


async def _freeze_triton(world: World, index: int, chance: random.Random) -> None:
    world.tritons[index].freeze()
    await asyncio.sleep(2 * chance.uniform(*FROZEN_S))
    world.tritons[index].thaw()


async def _kill_redis(world: World, chance: random.Random) -> None:
    await asyncio.to_thread(world.redis.kill)
    await asyncio.sleep(chance.uniform(0, 3))
    await asyncio.to_thread(world.redis.start)


async def _freeze_redis(world: World, chance: random.Random) -> None:
    world.redis.signal(signal.SIGSTOP)
    await asyncio.sleep(chance.uniform(*FROZEN_S))
    world.redis.signal(signal.SIGCONT)


async def _kill_worker(world: World, index: int) -> None:
    """The parent starts another; nothing else breaks before that one serves."""
    victim = world.workers()[index]
    world.deaths.append(time.monotonic())
    victim.kill()
    await asyncio.sleep(1)
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while await asyncio.to_thread(world.metric, "gateway_engine_ready") < 2:
        assert time.monotonic() < deadline, world.gateway.text[-5000:]
        await asyncio.sleep(0.2)


async def _freeze_worker(world: World, chance: random.Random) -> None:
    victim = chance.choice(world.workers())
    victim.suspend()
    await asyncio.sleep(chance.uniform(*FROZEN_S))
    victim.resume()


# What must be so afterwards


@asynccontextmanager
async def _load(world: World, name: str) -> AsyncIterator[None]:
    """Clients at work. A client that saw something wrong ends the body too."""
    stop = asyncio.Event()
    url, limits = world.gateway.url, httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for number in range(CLIENTS):
            group.create_task(_client(world, client, f"{name}-{number}", stop))
        yield
        stop.set()


async def _settle(world: World) -> None:
    """Until both replicas serve and nothing is in flight anywhere."""
    gauges = (
        "gateway_places_taken",
        "gateway_requests_waiting",
        "gateway_generations_in_flight",
        "gateway_replica_in_flight",
        "gateway_replica_failing",
    )
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while (
        ((busy := {name: world.metric(name) for name in gauges}) and any(busy.values()))
        or world.metric("gateway_replica_ready") < 4
        or world.metric("gateway_limits_shared") < 2
    ):
        assert time.monotonic() < deadline, busy
        await asyncio.sleep(0.2)
    world.tritons.wait_idle()


async def _all_permits_are_back(world: World) -> None:
    """As many requests at once as each tenant may have; those of dead workers are forgotten."""
    path, body = _body("demo", long=False, stream=False)

    async def refused() -> int:
        statuses: list[int] = []
        for key in TENANTS.values():
            async with world.gateway.async_client(key) as client:
                answers = [client.post(path, json=body) for _ in range(CONCURRENT)]
                statuses += [answer.status_code for answer in await asyncio.gather(*answers)]
        return sum(status != 200 for status in statuses)

    deadline = time.monotonic() + SETTLED_WITHIN_S
    while (left_out := await refused()) and time.monotonic() < deadline:
        await asyncio.sleep(2)
    assert not left_out


def _check_usage(world: World) -> None:
    records = [r for r in world.records() if r["request_id"] in world.seen]
    assert max(Counter(r["id"] for r in world.records()).values()) == 1
    by_request = Counter(r["request_id"] for r in records)
    assert max(by_request.values()) == 1
    found = {record["request_id"]: record for record in records}
    for request_id, seen in world.seen.items():
        record = found.get(request_id)
        if record is not None:
            assert record["tenant"] == seen.tenant
            took = record["ended"] - record["started"]
            assert took < seen.deadline_s + LATE_S, f"{request_id}: {seen.outcome}, {took:.1f} s"
        if seen.usage is not None:
            assert record is not None, f"{request_id} was answered and is not in the log"
            assert record["status"] == 200
            for kind in ("prompt_tokens", "completion_tokens"):
                assert record[kind] == seen.usage[kind], request_id
        elif seen.begun and not world.met_a_death(seen):
            assert record is not None, f"{request_id} ({seen.outcome}) is not in the log"
            # A client that leaves may have been answered whole in the same moment.
            assert record["status"] != 200 or seen.outcome == "left", request_id


def _footprint(world: World) -> tuple[int, int]:
    """Resident bytes and descriptors of the worker that has most."""
    workers = world.workers()
    return (
        max(worker.memory_info().rss for worker in workers),
        max(worker.num_fds() for worker in workers),
    )


@pytest.mark.slow
async def test_nothing_is_lost_when_things_break(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(6)
    await _learn_answers(world)
    async with _load(world, "calm"):
        await asyncio.sleep(10)
    await _settle(world)
    rss, descriptors = _footprint(world)
    assert not any(seen.outcome == "cut" for seen in world.seen.values())
    calm = Counter(seen.outcome for seen in world.seen.values())
    world.seen.clear()

    async with _load(world, "broken"):
        await _break_things(world, chance)
    await _settle(world)
    outcomes = Counter(seen.outcome for seen in world.seen.values())
    for seen in world.seen.values():
        assert seen.outcome != "cut" or world.met_a_death(seen)
    assert outcomes["right"] > sum(outcomes.values()) / 2
    _check_usage(world)
    await _all_permits_are_back(world)
    await _settle(world)
    rss_after, descriptors_after = _footprint(world)
    with capsys.disabled():
        print(f"\ncalm: {dict(calm)}\nbroken: {dict(outcomes)}\ndone: {dict(world.done)}")
        print(f"RSS {rss >> 20} -> {rss_after >> 20} MiB, fds {descriptors} -> {descriptors_after}")
    assert rss_after < rss + (48 << 20)
    assert descriptors_after < descriptors + 24
