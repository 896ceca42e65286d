"""A fleet that moves to the llmapi repository and back under load, while replicas are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from ops.commands.up import DEMO_ADAPTERS, DEMO_MODEL
from ops.local_stack.llmapi import max_seq_len, prepare_llmapi
from ops.local_stack.ports import PortClaims
from tests.support.cluster import TritonReplica, Tritons, core_repository, demo_engine
from tests.support.gateway_process import GatewayProcess
from tests.support.metrics import sample

pytestmark = pytest.mark.slow

OLD, NEW = 0, 1
WITHIN_S = 300.0
QUESTION = "美国的首都在哪里? \n答案:"
ANSWERS = {"demo": "Washington, D.C.", "zh": "华盛顿", "ja": "ワシントン"}
LONG = {"model": "demo", "prompt": "Count from 1 to 300", "max_tokens": 300}


def _new_repository(folder: Path) -> None:
    prepare_llmapi(DEMO_MODEL, folder.parent, {})


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tritons]:
    """Yield two Tritons with the same model, one for each repository."""
    folder = tmp_path_factory.mktemp("fleet")
    engine_dir = demo_engine(folder / "engine")
    with PortClaims() as claims:
        both = [
            TritonReplica(folder / "old", core_repository(engine_dir), claims),
            TritonReplica(folder / "new", _new_repository, claims),
        ]
        try:
            for replica in both:
                replica.start()
                replica.wait_ready()
            yield Tritons(both)
        finally:
            for replica in both:
                replica.end()


class Moving:
    """A gateway before both Tritons, under load. `ends` counts the answers by their outcome."""

    def __init__(self, fleet: Tritons, folder: Path) -> None:
        self.fleet = fleet
        self.config = folder / "c.yaml"
        self.weights = (100.0, 0.0)
        self.ends: Counter[str] = Counter()
        self.expected = ""
        self.killing = False
        self._write()
        self.gateway = GatewayProcess(
            folder / "g",
            fleet,
            config=self.config,
            allow_anonymous="true",
            adapters=json.dumps({name: str(DEMO_ADAPTERS / name) for name in ("zh", "ja")}),
            peft_dir=folder / "g" / "adapters" / "demo" / "peft",
            max_seq_len=max_seq_len(DEMO_MODEL, {}),
            replica_in_flight=16,
            admin_port=0,
        )

    def _write(self) -> None:
        entries = [
            {"endpoint": replica.endpoint, "weight": weight}
            for replica, weight in zip(self.fleet.replicas, self.weights, strict=True)
        ]
        new = self.config.with_suffix(".new")
        new.write_text(yaml.safe_dump({"anonymous": True, "replicas": entries}))
        new.replace(self.config)

    @contextlib.asynccontextmanager
    async def clients(self) -> AsyncIterator[Moving]:
        address = f"http://127.0.0.1:{self.gateway.admin_port}"
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(base_url=address, timeout=WITHIN_S) as self.admin,
            httpx.AsyncClient(base_url=self.gateway.url, timeout=WITHIN_S, limits=limits) as client,
        ):
            self.client = client
            yield self

    async def metric(self, name: str, replica: int) -> float:
        page = (await self.admin.get("/metrics")).text
        return sample(page, f"gateway_replica_{name}", replica=self.fleet[replica].endpoint)

    async def until(self, met: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not await met():
                await asyncio.sleep(0.02)

    async def weigh(self, old: float, new: float) -> None:
        self.weights = (old, new)
        self._write()
        self.gateway.process.send_signal(signal.SIGHUP)

        async def in_force() -> bool:
            return (await self.metric("weight", OLD), await self.metric("weight", NEW)) == (
                old,
                new,
            )

        await self.until(in_force)

    async def ask(self, **body: Any) -> tuple[str, str]:
        """Return the text of a streamed answer and its outcome: "whole" or its error code."""
        asked = {"temperature": 0, "stream": True} | body
        async with self.client.stream("POST", "/v1/completions", json=asked) as answer:
            if answer.status_code != 200:
                return "", f"status {answer.status_code}"
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
        assert lines.pop() == "data: [DONE]"
        frames = [json.loads(line.removeprefix("data: ")) for line in lines]
        errors = [frame["error"]["code"] for frame in frames if "error" in frame]
        choices = [choice for frame in frames for choice in frame.get("choices", ())]
        finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert len(errors) + len(finishes) == 1
        return "".join([choice["text"] for choice in choices]), errors[0] if errors else "whole"

    async def work(self, number: int, done: asyncio.Event) -> None:
        model = ("demo", "zh", "ja", "long")[number % 4]
        body = {"model": model, "prompt": QUESTION, "max_tokens": 8} if model != "long" else LONG
        right = ANSWERS[model] if model != "long" else self.expected
        while not done.is_set():
            text, end = await self.ask(**body)
            if end == "whole":
                self.ends["right" if text.strip() == right.strip() else "wrong"] += 1
            elif self.killing and right.strip().startswith(text.strip()):
                # A stream that broke before its first complete character has no text and an error
                # status.
                self.ends["broken off"] += 1
            else:
                self.ends[end] += 1

    async def answers(self, count: int) -> None:
        """Wait until `count` more answers are right."""
        goal = self.ends["right"] + count

        async def there() -> bool:
            return self.ends["right"] >= goal

        await self.until(there)

    async def gets_nothing(self, replica: int) -> None:
        """Check that the replica receives no request of the load while others are answered."""
        await self.answers(5)
        before = await self.metric("requests_total", replica)
        await self.answers(20)
        assert await self.metric("requests_total", replica) == before

    async def kill(self, replica: int) -> None:
        """Kill the replica while it has requests, check that only these fail, and restart it."""
        victim, broken = self.fleet[replica], self.ends["broken off"]

        async def is_busy() -> bool:
            return await self.metric("in_flight", replica) >= 2

        await self.until(is_busy)
        self.killing = True
        victim.kill()
        await self.answers(30)
        self.killing = False
        # At most one stream of each of the 8 clients was on the killed replica.
        assert self.ends["broken off"] - broken <= 8
        victim.start()
        await asyncio.to_thread(victim.wait_ready)

        async def is_seen() -> bool:
            return await self.metric("ready", replica) == 1

        await self.until(is_seen)


async def test_there_and_back_while_replicas_die(fleet: Tritons, tmp_path: Path) -> None:
    """Check that no text is wrong, and that only streams with tokens from a killed replica fail."""
    moving = Moving(fleet, tmp_path)
    with moving.gateway:
        async with moving.clients():
            moving.expected, end = await moving.ask(**LONG)
            assert end == "whole"
            done = asyncio.Event()
            load = [asyncio.create_task(moving.work(number, done)) for number in range(8)]
            try:
                await moving.gets_nothing(NEW)
                for weights in ((50, 50), (0, 100)):
                    await moving.weigh(*weights)
                    await moving.answers(20)
                await moving.gets_nothing(OLD)
                # The new repository does not support this request. The old one serves it while
                # available.
                text, end = await moving.ask(model="demo", prompt="Hi", max_tokens=3, logprobs=0)
                assert (bool(text), end) == (True, "whole")
                await moving.kill(NEW)
                await moving.answers(20)
                await moving.weigh(100, 0)
                await moving.gets_nothing(NEW)
                await moving.kill(OLD)
                await moving.answers(20)
                await moving.gets_nothing(NEW)
            finally:
                done.set()
                await asyncio.gather(*load)
    assert set(moving.ends) <= {"right", "broken off"}
    assert moving.ends["right"] > 150
