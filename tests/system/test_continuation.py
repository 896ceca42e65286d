"""Streams outlive their Triton: killed, frozen or drained, with every answer as if nothing was.

`KILLS=50 STREAMS=64` breaks it as often under as many streams, and prints the gaps that they saw.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from ops.commands.up import DEMO_ADAPTERS
from tests.support.cluster import Tritons, demo_engine, tritons
from tests.support.gateway_process import GatewayProcess
from tests.support.metrics import sample
from tests.support.triton_server import long_model

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("KILLS", "1"))
STREAMS = int(os.environ.get("STREAMS", "8"))
TOKENS = 120
WITHIN_S = 120.0
MODELS = ("demo", "zh", "ja")


class Answer(NamedTuple):
    """What a client can tell apart of it; `gap_s` is the longest that it waited for more."""

    text: str
    finish: str
    usage: dict[str, Any]
    logprobs: list[float]
    gap_s: float


@dataclass
class Fleet:
    tritons: Tritons
    gateway: GatewayProcess
    config: Path
    client: httpx.AsyncClient
    admin: httpx.AsyncClient

    async def metric(self, name: str, **labels: str) -> float:
        return sample((await self.admin.get("/metrics")).text, name, **labels)

    async def until(self, name: str, least: float, **labels: str) -> None:
        async with asyncio.timeout(WITHIN_S):
            while await self.metric(name, **labels) < least:
                await asyncio.sleep(0.02)

    async def ask(self, number: int) -> Answer:
        """A greedy answer; every third with log probabilities, every fourth not streamed."""
        body: dict[str, Any] = {
            "model": MODELS[number % len(MODELS)],
            "prompt": f"{number} and {number + 1} are",
            "max_tokens": TOKENS + number,
            "ignore_eos": True,
            "temperature": 0,
        }
        if number % 3 == 0:
            body["logprobs"] = 0
        if number % 4 == 0:
            answer = await self.client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return _answer([answer.json()], 0.0)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        frames, gap_s, last = [], 0.0, None
        async with self.client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                gap_s = max(gap_s, now - (last or now))
                last = now
                frames.append(json.loads(line.removeprefix("data: ")))
        return _answer(frames, gap_s)

    async def all(self) -> list[Answer]:
        return await asyncio.gather(*[self.ask(number) for number in range(STREAMS)])

    async def half_way(self) -> tuple[list[asyncio.Task[Answer]], float]:
        """All of them, once each has a first token, and how often some have gone on by then."""
        begun = await self._first_tokens()
        asked = [asyncio.create_task(self.ask(number)) for number in range(STREAMS)]
        async with asyncio.timeout(WITHIN_S):
            while await self._first_tokens() < begun + STREAMS:
                await asyncio.sleep(0.01)
        return asked, await self.continued()

    async def _first_tokens(self) -> float:
        name = "gateway_time_to_first_token_seconds_count"
        return sum([await self.metric(name, model=model) for model in MODELS])

    async def continued(self) -> float:
        causes = ("failed", "drained")
        name = "gateway_generations_continued_total"
        return sum([await self.metric(name, cause=cause) for cause in causes])

    def drain(self, *indexes: int) -> None:
        replicas = [
            {"endpoint": each.endpoint, "drain": index in indexes}
            for index, each in enumerate(self.tritons.replicas)
        ]
        self.config.write_text(yaml.safe_dump({"anonymous": True, "replicas": replicas}))


def _answer(frames: list[dict[str, Any]], gap_s: float) -> Answer:
    assert not any("error" in frame for frame in frames), frames[-1]
    choices = [frame["choices"][0] for frame in frames if frame["choices"]]
    (finish,) = [c["finish_reason"] for c in choices if c["finish_reason"]]
    (usage,) = [frame["usage"] for frame in frames if frame.get("usage")]
    usage.pop("prompt_tokens_details")  # what caches held differs from run to run
    entries = [c["logprobs"]["token_logprobs"] for c in choices if c["logprobs"]]
    assert not any("continued" in choice for choice in choices)
    values = [round(value, 3) for each in entries for value in each]
    return Answer("".join([c["text"] for c in choices]), finish, usage, values, gap_s)


def _equal(found: list[Answer], undisturbed: list[Answer]) -> None:
    assert [each._replace(gap_s=0.0) for each in found] == [
        each._replace(gap_s=0.0) for each in undisturbed
    ]


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Tritons, GatewayProcess, Path]]:
    folder = tmp_path_factory.mktemp("continuation")
    with tritons(folder, demo_engine(folder / "engine", long_model(folder))) as both:
        config = folder / "c.yaml"
        config.write_text(
            yaml.safe_dump({"anonymous": True, "replicas": both.triton_grpc.split(",")})
        )
        settings = {
            "config": config,
            "allow_anonymous": "true",
            "adapters": json.dumps({name: str(DEMO_ADAPTERS / name) for name in MODELS[1:]}),
            "admin_port": 0,
            "replica_drain_grace": 0.2,
        }
        with GatewayProcess(folder / "g", both, **settings) as gateway:
            yield both, gateway, config


@pytest.fixture
async def fleet(started: tuple[Tritons, GatewayProcess, Path]) -> AsyncIterator[Fleet]:
    both, gateway, config = started
    admin = httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.admin_port}", timeout=60)
    limits = httpx.Limits(max_connections=None)
    client = httpx.AsyncClient(base_url=gateway.url, timeout=600, limits=limits)
    async with admin, client:
        fleet = Fleet(both, gateway, config, client, admin)
        await fleet.until("gateway_replica_ready", 2)
        yield fleet


async def test_whatever_becomes_of_a_triton_every_answer_is_the_undisturbed_one(
    fleet: Fleet,
) -> None:
    undisturbed = await fleet.all()
    gaps: list[float] = []
    for kill in range(KILLS):
        victim = fleet.tritons[kill % 2]
        asked, before = await fleet.half_way()
        victim.kill()
        found = await asyncio.gather(*asked)
        _equal(found, undisturbed)
        assert await fleet.continued() > before
        gaps += [answer.gap_s for answer in found]
        victim.start()
        victim.wait_ready()
        await fleet.until("gateway_replica_ready", 2)
    print(f"{KILLS} kills: longest gaps {sorted(gaps)[-len(gaps) // 100 or -1 :]} s")

    asked, before = await fleet.half_way()
    fleet.tritons[0].freeze()
    try:
        _equal(await asyncio.gather(*asked), undisturbed)
    finally:
        fleet.tritons[0].thaw()
    assert await fleet.continued() > before
    await fleet.until("gateway_replica_ready", 2)

    asked, before = await fleet.half_way()
    fleet.drain(1)
    endpoint = fleet.tritons[1].endpoint
    while await fleet.metric("gateway_replica_in_flight", replica=endpoint):
        assert not all(task.done() for task in asked)
        await asyncio.sleep(0.01)
    _equal(await asyncio.gather(*asked), undisturbed)
    assert await fleet.continued() > before
    fleet.drain()
    fleet.tritons.wait_idle()
