"""The servers of a chaos run: two gateways with two workers, two Tritons and a Redis."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ops.commands.up import DEMO_ADAPTERS, DEMO_MODEL
from tests.chaos import adapters, clock
from tests.chaos.adapters import ADMIN_KEY, LIVE, Content, LiveHistory
from tests.chaos.gateway import Gateway, running_gateways
from tests.chaos.questions import CAPITALS, GENERATED, QUESTIONS, SHORT, Question, text_of
from tests.support.cluster import Tritons, tritons
from tests.support.gateway_process import tenant, write_config
from tests.support.redis_server import RedisServer, running_redis
from triton_repo.cpu_executor import engine

CONCURRENT = 40
TENANTS = {"acme": "sk-acme-key", "other": "sk-other-key", "third": "sk-third-key"}
TIGHT, TIGHT_KEY = "tight", "sk-tight-key"
REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE = 40, 600
# More adapters of 172 kB than the caches of both engines can hold.
MANY = 20
_CACHE = {"lora_cache_host_memory_bytes": 1_600_000, "lora_cache_max_adapter_size": 16}
# Adapters in the configuration, and their content.
_CONFIGURED = {"zh": "zh", "acme/own": "ja", "other/own": "zh", "third/own": "ja"}


@dataclass
class World:
    """The servers. `answers` is by content and question; `digests` has contents by short digest."""

    tritons: Tritons
    redis: RedisServer
    gateways: list[Gateway]
    chance: random.Random
    contents: dict[str, Content]
    answers: dict[tuple[str, Question], str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    fixed: dict[str, str] = field(default_factory=dict)
    """Content by name for names that never change. The base model's content is `demo`."""
    live: LiveHistory = field(default_factory=LiveHistory)
    redis_lost: list[tuple[float, float]] = field(default_factory=list)
    """Periods from the end of Redis until an empty one was available."""
    aborts: int = 0
    """Tritons that crashed by themselves, as the Python backend of 2.51 does occasionally."""
    evictions: int = 0
    """Number of adapters uploaded again after an eviction, at least."""
    done: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)
    """Faults that are impossible on this machine, with the reason."""
    broken: list[str] = field(default_factory=list)
    """Problems found during the run, in words; see `found_wrong`."""

    @property
    def many(self) -> list[str]:
        return [name for name in self.fixed if name.startswith("many-")]

    def found_wrong(self, sentence: str) -> None:
        print(f"{time.strftime('%X')} WRONG: {sentence}", flush=True)
        self.broken.append(sentence)

    def metrics(self) -> defaultdict[str, float]:
        """Return metrics by name, summed over all workers of all gateways."""
        found: defaultdict[str, float] = defaultdict(float)
        for gateway in self.gateways:
            for name, value in gateway.metrics().items():
                found[name] += value
        return found

    async def revive(self) -> None:
        """Restart each Triton that has crashed, like `gateway up --restart`."""
        for replica in self.tritons.replicas:
            if replica.has_ended:
                self.aborts += 1
                await asyncio.to_thread(replica.kill)
                await asyncio.to_thread(replica.start)
                await asyncio.to_thread(replica.wait_ready)

    @contextlib.asynccontextmanager
    async def redis_dies(self) -> AsyncIterator[None]:
        died = time.monotonic()
        await asyncio.to_thread(self.redis.kill)
        yield
        await asyncio.to_thread(self.redis.start)
        self.redis_lost.append((died, time.monotonic()))


@contextlib.contextmanager
def running_world(folder: Path, seed: int, **more: object) -> Iterator[World]:
    """Run all servers until they are ready, without any request. `more` are gateway settings."""
    engine_dir = engine.build(
        DEMO_MODEL,
        folder / "engine",
        lora_target_modules=engine.LLAMA_LORA_MODULES,
        gather_generation_logits=True,  # shows how clear an answer is
    )
    made = adapters.generated_contents(folder, engine_dir, MANY)
    contents = {content.name: content for content in [*adapters.demo_contents(), *made]}
    settings = {
        **more,
        "config": _config(folder),
        "adapters": json.dumps({n: str(DEMO_ADAPTERS / of) for n, of in _CONFIGURED.items()}),
        "admin_port": 0,
        "admin_key": ADMIN_KEY,
        "replica_in_flight": 24,
        "queue_timeout": 8,
    }
    with (
        running_redis() as redis,
        tritons(folder, engine_dir, **_CACHE) as both,
        running_gateways("ab", folder, both, redis_url=redis.url, **settings) as gateways,
    ):
        chance = random.Random(seed)
        world = World(both, redis, gateways, chance, contents)
        if (reason := clock.why_not()) is not None:
            world.skipped["move a wall clock"] = reason
        for content, text in made.items():
            world.answers[content.name, GENERATED] = text
        yield world


def _config(folder: Path) -> Path:
    plain = [
        tenant(name, key, concurrent_requests=CONCURRENT, tokens_per_day=10**12)
        for name, key in TENANTS.items()
    ]
    tight = tenant(
        TIGHT,
        TIGHT_KEY,
        requests_per_minute=REQUESTS_PER_MINUTE,
        tokens_per_minute=TOKENS_PER_MINUTE,
    )
    # "refuse", because workers that count by themselves when Redis is slow would admit too many.
    away = {"requests_per_minute": "refuse", "tokens_per_minute": "refuse"}
    limits = {"when_redis_is_away": away}
    return write_config(folder / "config.yaml", *plain, tight, limits=limits)


async def learn(world: World) -> None:
    """Add the adapters, and record the answers to all questions before the chaos."""
    first = world.gateways[0]
    world.fixed = {"demo": "demo", **_CONFIGURED}
    for number, name in enumerate(name for name in world.contents if name not in CAPITALS):
        added = await adapters.add(first, f"many-{number}", world.contents[name])
        assert added.status_code == 201, added.text
        world.fixed[f"many-{number}"] = name
    for name in ("ja", "zh"):
        added = await adapters.add(first, LIVE, world.contents[name])
        assert added.status_code == 201, added.text
        world.digests[added.json()["served"]] = name
    for name, digest in (await adapters.wait_until_agreed(world.gateways)).items():
        if name == LIVE:
            world.live.may_be([digest])
        else:
            assert world.digests.setdefault(digest, world.fixed[name]) == world.fixed[name]
    by_digest = {content: digest for digest, content in world.digests.items()}
    async with first.process.async_client(TENANTS["acme"]) as client:
        for content, capital in CAPITALS.items():
            model = content if content == "demo" else f"{LIVE}@{by_digest[content]}"
            for question in [*QUESTIONS, GENERATED]:
                body = question.body(model, stream=False)
                answer = await client.post(question.path, json=body)
                assert answer.status_code == 200, answer.text
                world.answers[content, question] = text_of([answer.json()])
            assert world.answers[content, SHORT] == capital
