"""A run from the first start to the results."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.chaos.adapters import Content
from tests.disks.world import REPLICAS, Agent, Watched, World, running_world, until
from tests.support.generated_adapters import PROMPT, TOKENS

_LATE = 2
"""Number of adapters that are added to full disks, after as many were removed."""
_PAUSE_S = 0.05
_ASKED_BETWEEN = 20


@dataclass
class Found:
    """The results of a run. `outcomes` counts `right`, `wrong`, and errors by status and code."""

    adapters: int
    bound: int
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    kills: int = 0
    flushes: int = 0
    most: list[int] = field(default_factory=list)

    @property
    def broken(self) -> bool:
        return self.outcomes.keys() != {"right"} or max(self.most) > self.bound

    def text(self) -> str:
        return (
            f"{self.adapters} adapters in 2 versions each, {REPLICAS} Tritons, "
            f"{self.seconds:.0f} s: {self.outcomes.total()} requests, {dict(self.outcomes)}; "
            f"agents killed {self.kills} times, Redis emptied {self.flushes} times; a disk held "
            f"{max(self.most)} bytes at most, its bound is {self.bound}"
        )


class Load:
    """Clients that request random versions by name or digest and check the answers."""

    def __init__(self, world: World, outcomes: Counter[str], chance: random.Random) -> None:
        self._world = world
        self._outcomes = outcomes
        self._chance = chance
        self._ended = False
        self.expected: dict[str, str] = {}
        """Expected answer by model name. Requests for a removed name may still be running."""

    @contextlib.asynccontextmanager
    async def running(self, clients: int) -> AsyncIterator[None]:
        async with httpx.AsyncClient(base_url=self._world.gateway.url, timeout=None) as client:
            tasks = [asyncio.create_task(self._keep_on(client)) for _ in range(clients)]
            try:
                yield
            finally:
                self._ended = True
                await asyncio.gather(*tasks)

    async def more(self, count: int = _ASKED_BETWEEN) -> None:
        """Wait until `count` more requests have been answered."""
        least = self._outcomes.total() + count
        while self._outcomes.total() < least:
            await asyncio.sleep(0.1)

    async def _keep_on(self, client: httpx.AsyncClient) -> None:
        while not self._ended:
            model = self._chance.choice(list(self.expected))
            body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
            outcome = await self._ask(client, body, self.expected[model])
            self._outcomes[outcome] += 1
            if outcome != "right":
                print(f"{time.strftime('%X')} {model}: {outcome}", flush=True)
            await asyncio.sleep(_PAUSE_S)

    async def _ask(self, client: httpx.AsyncClient, body: dict[str, object], expected: str) -> str:
        try:
            answer = await client.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            return type(error).__name__
        if answer.status_code != 200:
            return f"{answer.status_code} {answer.json()['error']['code']}"
        # Expected answers leave out incomplete characters.
        text = answer.json()["choices"][0]["text"].replace("\ufffd", "").strip()
        return "right" if text == expected else f"wrong: {text!r}, not {expected!r}"


async def run(folder: Path, adapters: int, seed: int, *, clients: int) -> Found:
    """Run all phases and return the results. `folder` receives logs and disks.

    Raises AssertionError if a phase does not finish.
    """
    kept = 2 * adapters
    began = time.monotonic()
    with running_world(folder, kept + 2 * _LATE, kept) as world:
        found = Found(adapters, world.bound)
        load, watched = Load(world, found.outcomes, random.Random(seed)), Watched(world.agents)
        pairs = list(zip(world.contents[::2], world.contents[1::2], strict=True))
        first, late = pairs[:adapters], pairs[adapters:]
        for number, versions in enumerate(first):
            await asyncio.to_thread(_add, world, load, f"a{number}", versions)
        with watched.running():
            async with load.running(clients):
                await _half_way(world, load, kept)
                await _redis_forgets(world, load, kept)
                await _others_come(world, load, late, kept)
        found.kills = sum(agent.kills for agent in world.agents)
        found.flushes, found.most = 2, watched.most
        found.seconds = time.monotonic() - began
    return found


def _add(world: World, load: Load, name: str, versions: tuple[tuple[Content, str], ...]) -> None:
    """Upload both versions. The name without a version then serves the last one."""
    with world.admin() as admin:
        for content, answer in versions:
            files = [
                ("file", (part, (content.folder / part).read_bytes()))
                for part in ("adapter_config.json", "adapter_model.safetensors")
            ]
            added = admin.post("/adapters", data={"name": name, "base": "demo"}, files=files)
            assert added.status_code == 201, added.text
            load.expected[f"{name}@{added.json()['served']}"] = answer
    # Set only now: while a version is being activated, either version is right.
    load.expected[name] = answer


async def _killed(agent: Agent) -> None:
    await asyncio.to_thread(agent.kill)


async def _half_way(world: World, load: Load, kept: int) -> None:
    """Kill each agent while it copies adapters to its disk, each at a different point."""
    for agent in world.agents:
        agent.start()
    for number, agent in enumerate(world.agents):
        share = kept * (number + 1) // (REPLICAS + 1)
        await asyncio.to_thread(until, lambda a=agent, n=share: len(a.held) >= n, "half-way")
        await _killed(agent)
        await load.more()
        agent.start()
    for agent in world.agents:
        await asyncio.to_thread(until, lambda a=agent: len(a.held) == kept, "all are on the disk")
    await load.more()


async def _redis_forgets(world: World, load: Load, kept: int) -> None:
    with contextlib.closing(world.redis.client()) as client:
        client.flushall()
    await load.more()
    await _killed(world.agents[0])
    await load.more()
    await asyncio.to_thread(world.redis.kill)
    await load.more()
    await asyncio.to_thread(world.redis.start)
    world.agents[0].start()
    await load.more()
    assert all(len(agent.held) == kept for agent in world.agents)


async def _others_come(
    world: World,
    load: Load,
    late: list[tuple[tuple[Content, str], tuple[Content, str]]],
    kept: int,
) -> None:
    """Replace adapters on full disks: agents delete unused versions only if all gateways agree."""
    before = [agent.held for agent in world.agents]
    with world.admin() as admin:
        for number in range(_LATE):
            name = f"a{number}"
            for model in [model for model in load.expected if model.partition("@")[0] == name]:
                del load.expected[model]
            await load.more()  # after this, no request for it is running
            removed = await asyncio.to_thread(admin.delete, f"/adapters/{name}")
            assert removed.status_code == 200, removed.text
    for number, versions in enumerate(late):
        await asyncio.to_thread(_add, world, load, f"late{number}", versions)
    await _killed(world.agents[1])
    await load.more()
    world.agents[1].start()
    for agent, old in zip(world.agents, before, strict=True):
        await asyncio.to_thread(
            until, lambda a=agent, o=old: len(a.held - o) == 2 * _LATE, "late ones are there"
        )
        assert len(agent.held) == kept
    await load.more(3 * _ASKED_BETWEEN)
