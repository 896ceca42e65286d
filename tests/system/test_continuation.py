"""Streams outlive their Triton: killed, frozen, cut off or drained, each as if nothing was.

`KILLS=50 STREAMS=64` breaks it as often under as many streams, and prints the gaps that they saw.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from ops.commands.up import DEMO_ADAPTERS
from tests.support.cluster import Tritons, tritons
from tests.support.gateway_process import GatewayProcess
from tests.support.metrics import sample
from tests.support.triton_server import long_model
from tests.support.wire import Wire
from triton_repo.cpu_executor import engine

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("KILLS", "1"))
STREAMS = int(os.environ.get("STREAMS", "8"))
TOKENS = 400  # more than a replica makes until it is seen to be drained
WITHIN_S = 120.0
MODELS = ("demo", "zh", "ja")
CONTINUED = "gateway_generations_continued_total"
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"frequency_penalty": 0.4, "presence_penalty": 0.3},
    {"repetition_penalty": 1.2, "min_tokens": 100},
    {"bad_words": [" the", "he c"], "logit_bias": {"65": 1.5}},
    {"guided_regex": "[a-z ]{1000}"},
)


Started = tuple[Tritons, GatewayProcess, Path, list["Answer"]]


class Answer(NamedTuple):
    """What a client can tell apart of it; `gap_s` is the longest that it waited for more once a
    replica was broken."""

    text: str
    finish: str
    usage: dict[str, Any]
    logprobs: list[float]
    gap_s: float


class Gaps(NamedTuple):
    """What is guided is said again by the other replica, and waits for as long as that takes."""

    guided: list[float]
    others: list[float]

    def tell(self, what: str) -> None:
        for kind, gaps in (("guided", self.guided), ("other", self.others)):
            ordered = sorted(gaps)
            if not ordered:
                continue
            p50, p99 = (ordered[math.ceil(len(ordered) * share) - 1] for share in (0.5, 0.99))
            found = f"longest gaps of {len(gaps)} {kind} streams: p50 {p50:.2f} s, p99 {p99:.2f} s"
            print(f"{what}: {found}", flush=True)


@dataclass
class Fleet:
    """`undisturbed` are the answers of all, by their numbers."""

    tritons: Tritons
    gateway: GatewayProcess
    config: Path
    client: httpx.AsyncClient
    admin: httpx.AsyncClient
    undisturbed: list[Answer]
    broken_at: float = math.inf
    """Gaps that end later are those that this may have made."""
    begun: set[int] = field(default_factory=set)
    """Streams that have a first token, by their numbers."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when one more has."""

    async def metric(self, name: str, **labels: str) -> float:
        return sample((await self.admin.get("/metrics")).text, name, **labels)

    async def until(self, name: str, least: float, **labels: str) -> None:
        async with asyncio.timeout(WITHIN_S):
            while await self.metric(name, **labels) < least:
                await asyncio.sleep(0.02)

    async def ask(self, number: int) -> Answer:
        """A greedy answer; every third with log probabilities, every fourth not streamed, of each
        five all but one with something that the engine must go on with."""
        body: dict[str, Any] = {
            "model": MODELS[number % len(MODELS)],
            "prompt": f"{number} and {number + 1} are",
            "max_tokens": TOKENS + number,
            "ignore_eos": True,
            "temperature": 0,
        }
        body |= OPTIONS[number % len(OPTIONS)]
        if number % 3 == 0:
            body["logprobs"] = number % 2 * 2
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
                if last is not None and now > self.broken_at:
                    gap_s = max(gap_s, now - last)
                last = now
                frames.append(json.loads(line.removeprefix("data: ")))
                if number not in self.begun:
                    self.begun.add(number)
                    self.news.set()
        return _answer(frames, gap_s)

    async def all(self) -> list[Answer]:
        return await asyncio.gather(*[self.ask(number) for number in range(STREAMS)])

    async def half_way(self) -> tuple[list[asyncio.Task[Answer]], float]:
        """All of them, once each stream has a first token, and how often some had gone on before.

        The streams tell: on a busy machine they would end while the metrics are asked for.
        """
        self.broken_at = math.inf
        self.begun.clear()
        before = await self.continued()
        asked = [asyncio.create_task(self.ask(number)) for number in range(STREAMS)]
        async with asyncio.timeout(WITHIN_S):
            while len(self.begun) < len([n for n in range(STREAMS) if n % 4]):
                self.news.clear()
                await self.news.wait()
        self.broken_at = time.monotonic()
        return asked, before

    async def continued(self) -> float:
        return sum([await self.metric(CONTINUED, cause=cause) for cause in ("failed", "drained")])

    async def are_whole(self, asked: list[asyncio.Task[Answer]], before: float) -> Gaps:
        """Some have gone on since `before`, and nobody can tell but by the gaps of streams, in
        seconds, which it returns."""
        found = await asyncio.gather(*asked)
        assert [each._replace(gap_s=0.0) for each in found] == self.undisturbed
        assert await self.continued() > before
        gaps = Gaps([], [])
        for number, each in enumerate(found):
            if each.gap_s:
                (gaps.guided if _is_guided(number) else gaps.others).append(each.gap_s)
        return gaps

    def configure(self, *endpoints: str | dict[str, Any]) -> None:
        document = {"anonymous": True, "replicas": list(endpoints)}
        self.config.write_text(yaml.safe_dump(document))
        self.gateway.process.send_signal(signal.SIGHUP)

    def drain(self, *indexes: int) -> None:
        """These, and no other."""
        self.configure(
            *[
                {"endpoint": each.endpoint, "drain": index in indexes}
                for index, each in enumerate(self.tritons.replicas)
            ]
        )


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


def _is_guided(number: int) -> bool:
    return "guided_regex" in OPTIONS[number % len(OPTIONS)]


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Started]:
    folder = tmp_path_factory.mktemp("continuation")
    engine_dir = engine.build(
        long_model(folder),
        folder / "engine",
        lora_target_modules=engine.LLAMA_LORA_MODULES,
        gather_generation_logits=True,
    )
    with tritons(folder, engine_dir) as both:
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
            yield both, gateway, config, []


@pytest.fixture
async def fleet(started: Started) -> AsyncIterator[Fleet]:
    both, gateway, config, known = started
    admin = httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.admin_port}", timeout=60)
    limits = httpx.Limits(max_connections=None)
    client = httpx.AsyncClient(base_url=gateway.url, timeout=600, limits=limits)
    async with admin, client:
        fleet = Fleet(both, gateway, config, client, admin, known)
        await fleet.until("gateway_replica_ready", 2)
        if not known:
            known += [each._replace(gap_s=0.0) for each in await fleet.all()]
            assert len(known) == STREAMS
            assert not await fleet.continued()
        yield fleet


async def test_killed(fleet: Fleet) -> None:
    gaps = Gaps([], [])
    for kill in range(KILLS):
        victim = fleet.tritons[kill % 2]
        asked, before = await fleet.half_way()
        victim.kill()
        for known, new in zip(gaps, await fleet.are_whole(asked, before), strict=True):
            known.extend(new)
        victim.start()
        victim.wait_ready()
        await fleet.until("gateway_replica_ready", 2)
        gaps.tell(f"killed {kill + 1} times")


async def test_frozen(fleet: Fleet) -> None:
    asked, before = await fleet.half_way()
    fleet.tritons[0].freeze()
    try:
        (await fleet.are_whole(asked, before)).tell("frozen")
    finally:
        await fleet.tritons[0].thaw()
    await fleet.until("gateway_replica_ready", 2)


async def test_cut_off(fleet: Fleet) -> None:
    wire = Wire(fleet.tritons[0].endpoint)
    async with wire.running() as endpoint:
        fleet.configure(endpoint, fleet.tritons[1].endpoint)
        await fleet.until("gateway_replica_ready", 1, replica=endpoint)
        await fleet.until("gateway_replica_ready", 2)
        asked, before = await fleet.half_way()
        wire.cut()
        (await fleet.are_whole(asked, before)).tell("cut off")
        wire.mend()
        fleet.drain()
        await fleet.until("gateway_replica_ready", 1, replica=fleet.tritons[0].endpoint)
    fleet.tritons.wait_idle()


async def test_drained(fleet: Fleet) -> None:
    """What is guided stays, everything else has left before its end."""
    asked, before = await fleet.half_way()
    failed = await fleet.metric(CONTINUED, cause="failed")
    draining = fleet.tritons[1].endpoint
    assert await fleet.metric("gateway_replica_weight", replica=draining) > 0
    assert await fleet.metric("gateway_replica_in_flight", replica=draining) > 0
    # Until the gateway has read of the drain, so that no quick engine ends its answers first.
    fleet.tritons[1].freeze()
    try:
        fleet.drain(1)
        async with asyncio.timeout(WITHIN_S):
            while await fleet.metric("gateway_replica_weight", replica=draining):
                await asyncio.sleep(0.01)
    finally:
        await fleet.tritons[1].thaw()
    guided = len([n for n in range(STREAMS) if _is_guided(n)])
    while await fleet.metric("gateway_replica_in_flight", replica=draining) > guided:
        assert not all(task.done() for task in asked)
        await asyncio.sleep(0.01)
    (await fleet.are_whole(asked, before)).tell("drained")
    # It was not frozen for so long that the gateway gave it up.
    assert await fleet.metric(CONTINUED, cause="failed") == failed
    fleet.drain()
    fleet.tritons.wait_idle()
