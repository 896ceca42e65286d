"""Streams that survive a Triton that is killed, frozen, disconnected or drained.

Clients must see no difference. `KILLS=50 STREAMS=64` sets the number of faults and of streams. The
test prints the longest gaps between tokens.
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
TOKENS = 400  # more than a replica generates before the gateway has seen its drain
WITHIN_S = 300.0
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
    """A client's view of a response, compared with an undisturbed run.

    `gap_s` is the longest wait for a token after a replica failed, in seconds.
    """

    text: str
    finish: str
    usage: dict[str, Any]
    logprobs: list[float]
    gap_s: float


class Gaps(NamedTuple):
    """The longest gaps of streams, in seconds.

    Guided answers are separate: the other replica regenerates them from the start, which takes
    longer.
    """

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
    """Two Tritons behind a gateway. `undisturbed` has the expected answers by request number."""

    tritons: Tritons
    gateway: GatewayProcess
    config: Path
    client: httpx.AsyncClient
    admin: httpx.AsyncClient
    undisturbed: list[Answer]
    broken_at: float = math.inf
    """Monotonic time of the fault. Only gaps that end later count."""
    begun: set[int] = field(default_factory=set)
    """Numbers of the streams that have received their first token."""
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when another stream receives its first token."""

    async def metric(self, name: str, **labels: str) -> float:
        return sample((await self.admin.get("/metrics")).text, name, **labels)

    async def until(self, name: str, least: float, **labels: str) -> None:
        async with asyncio.timeout(WITHIN_S):
            while await self.metric(name, **labels) < least:
                await asyncio.sleep(0.02)

    async def ask(self, number: int) -> Answer:
        """Return the greedy answer to request `number`.

        Every third request asks for log probabilities, and every fourth is not streamed. Four of
        five have an option that another replica must apply when it resumes, such as a penalty or a
        guide.
        """
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
        """Start all requests, and return once each stream has its first token.

        Return the tasks and the number of requests that were resumed earlier. Streams report their
        first token themselves: on a busy machine they would end before the metrics could be read.
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
        """Check that all answers are as expected and that some were resumed since `before`.

        Return the longest gaps of the streams, the only difference that a client can see.
        """
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
        """Drain the replicas with these indexes and no other."""
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
    usage.pop("prompt_tokens_details")  # cached tokens differ from run to run
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
    """Check that a drain moves all requests except guided ones, which finish on their replica."""
    asked, before = await fleet.half_way()
    failed = await fleet.metric(CONTINUED, cause="failed")
    draining = fleet.tritons[1].endpoint
    assert await fleet.metric("gateway_replica_weight", replica=draining) > 0
    assert await fleet.metric("gateway_replica_in_flight", replica=draining) > 0
    # The replica is frozen until the gateway has read the drain. A fast engine would finish its
    # answers before that.
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
    # The freeze was too short for the gateway to consider the replica as failed.
    assert await fleet.metric(CONTINUED, cause="failed") == failed
    fleet.drain()
    fleet.tritons.wait_idle()
