"""Benchmark of three routing policies, which replays a trace of chats on four replicas.

    python -m bench.routing [--seed N] [--conversations N] [--rounds N]

The command measures the time to the first token, and the fraction of the prompt tokens whose keys
and values a replica found in its cache.

A conversation has several turns after one of a few common system prompts. Half of the conversations
use one of 50 adapters. Between two turns, the client waits for the time that a user needs to read
the answer. Four real Tritons run the demo model on the CPU executor. Their KV caches reuse blocks
as TensorRT-LLM does. The caches are too small for all conversations of the trace.

Policies: `known`, the released gateway's policy, estimates the contents of the caches. `affinity`
sends prompts with equal beginnings to the same replica, without such an estimate. `round robin`
ignores the prompts, too. Each policy starts with fresh processes and replays the same trace. The
order of the policies is reversed after each round. The prompts of each run begin with a unique
name, so no run can use the cache of another run.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.machine import ROOT
from bench.measure import percentile
from bench.servers import MODEL, environment, started_triton, wait_ready
from ops.local_stack.ports import LOCALHOST, PortClaims
from ops.local_stack.process import Child, adopt_orphans
from ops.local_stack.repository import PARAMETERS
from triton_repo.cpu_executor import engine
from triton_repo.render import render

REPLICAS, ADAPTERS, SYSTEMS = 4, 50, 5
POLICIES = "known", "affinity", "round robin"
_CACHE_TOKENS, _BLOCK = 12_288, 32
_WITHIN_S = 300.0
_WORDS = (ROOT / "demo" / "README.md").read_text(encoding="utf-8").split()


@dataclass(frozen=True)
class TracedConversation:
    """A conversation in the trace.

    `begins` is the time in seconds from the start of the trace. A turn has a question, the number
    of tokens of the answer, and the seconds for which the user then reads the answer.
    """

    begins: float
    model: str
    system: str
    turns: Sequence[tuple[str, int, float]]


@dataclass
class CacheUse:
    """Measurements of one replay of the trace.

    `prompt` is the total number of prompt tokens. `reused` is the number of these tokens that a KV
    cache contained. `first` has the seconds to the first token of each request.
    """

    prompt: int = 0
    reused: int = 0
    first: list[float] = field(default_factory=list)


def trace(seed: int, conversations: int, each_s: float) -> list[TracedConversation]:
    """Return random conversations. On average, one starts every `each_s` seconds."""
    rng = random.Random(seed)

    def words(least: int, most: int) -> str:
        return " ".join(rng.choices(_WORDS, k=rng.randint(least, most)))

    def likely(count: int) -> int:
        return rng.choices(range(count), [1 / (1 + place) for place in range(count)])[0]

    systems = [words(60, 160) for _ in range(SYSTEMS)]
    made, now = [], 0.0
    for _ in range(conversations):
        now += rng.expovariate(1 / each_s)
        model = "demo" if rng.random() < 0.5 else f"adapter-{likely(ADAPTERS)}"
        turns = [
            (words(10, 40), rng.randint(16, 64), rng.expovariate(1 / (4 * each_s)))
            for _ in range(rng.randint(2, 6))
        ]
        made.append(TracedConversation(now, model, systems[likely(SYSTEMS)], turns))
    return made


async def _converse(
    client: httpx.AsyncClient,
    conversation: TracedConversation,
    run: str,
    began: float,
    seen: CacheUse,
) -> None:
    await asyncio.sleep(max(0.0, began + conversation.begins - time.perf_counter()))
    messages = [{"role": "system", "content": f"{run} {conversation.system}"}]
    for question, tokens, reading_s in conversation.turns:
        messages.append({"role": "user", "content": question})
        body = {
            "model": conversation.model,
            "messages": messages,
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent, first, text = time.perf_counter(), None, ""
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError((await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or time.perf_counter() - sent
                event = json.loads(line.removeprefix("data: "))
                if usage := event.get("usage"):
                    seen.prompt += usage["prompt_tokens"]
                    seen.reused += usage["prompt_tokens_details"]["cached_tokens"]
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
        assert first is not None
        seen.first.append(first)
        messages.append({"role": "assistant", "content": text})
        await asyncio.sleep(reading_s)


async def _replay(
    port: int, conversations: Sequence[TracedConversation], run: str, seen: CacheUse
) -> None:
    limits = httpx.Limits(max_connections=None)
    url = f"http://{LOCALHOST}:{port}"
    async with (
        httpx.AsyncClient(base_url=url, timeout=_WITHIN_S, limits=limits) as client,
        asyncio.TaskGroup() as tasks,
    ):
        began = time.perf_counter()
        for conversation in conversations:
            tasks.create_task(_converse(client, conversation, run, began, seen))


@contextlib.contextmanager
def _tritons(folder: Path, claims: PortClaims) -> Iterator[str]:
    """Run four tritonservers with the same engine. Yield their host:port, separated by commas."""
    engine.build(
        MODEL,
        folder / "engine",
        tokens_per_block=_BLOCK,
        lora_target_modules=engine.LLAMA_LORA_MODULES,
    )
    parameters: dict[str, Any] = {
        **{name: PARAMETERS[name] for name in PARAMETERS if "instance_count" not in name},
        "engine_dir": str(folder / "engine"),
        "tokenizer_dir": str(MODEL),
        "max_tokens_in_paged_kv_cache": _CACHE_TOKENS,
    }
    with contextlib.ExitStack() as stack:
        found = []
        for number in range(REPLICAS):
            place = folder / f"triton-{number}"
            render(place / "repository", parameters, ["tensorrt_llm"])
            found.append(stack.enter_context(started_triton(place, claims)).grpc)
        yield ",".join(found)


def _adapters(folder: Path) -> dict[str, str]:
    """Create `ADAPTERS` adapters, and return their folders by name.

    They are copies of the demo's Japanese adapter with different values of `lora_alpha`.
    """
    found = {}
    for number in range(ADAPTERS):
        place = folder / f"adapter-{number}"
        shutil.copytree(ROOT / "demo" / "adapters" / "ja", place)
        config = json.loads((place / "adapter_config.json").read_text())
        config["lora_alpha"] = 1 + number
        (place / "adapter_config.json").write_text(json.dumps(config))
        found[place.name] = str(place)
    return found


@contextlib.contextmanager
def _gateway(
    folder: Path, claims: PortClaims, triton: str, adapters: dict[str, str], policy: str
) -> Iterator[int]:
    """Run a gateway that chooses replicas by `policy`. Yield its port."""
    port = claims.take_free()
    env = {
        "GATEWAY_PORT": str(port),
        "GATEWAY_TRITON_GRPC": triton,
        "GATEWAY_TOKENIZER_DIR": str(MODEL),
        "GATEWAY_STORE_DIR": str(folder / "adapters"),
        "GATEWAY_ADAPTERS": json.dumps(adapters),
        "GATEWAY_SHUTDOWN_GRACE": "1",
    }
    folder.mkdir()
    command = [sys.executable, "-m", "bench.routing_gateway", policy]
    child = Child(policy, command, environment(env), folder / "gateway.log")
    child.start()
    try:
        wait_ready(child, f"http://{LOCALHOST}:{port}/health/ready")
        yield port
    finally:
        child.terminate()
        child.reap(5.0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.routing")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=150)
    parser.add_argument("--each", type=float, default=0.25, help="seconds between two that begin")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    conversations = trace(options.seed, options.conversations, options.each)
    seen = {policy: CacheUse() for policy in POLICIES}
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="gateway-bench-") as name, PortClaims() as claims:
        folder = Path(name)
        adapters = _adapters(folder)
        with _tritons(folder, claims) as triton:
            for number in range(options.rounds):
                for policy in POLICIES[:: -1 if number % 2 else 1]:
                    run = f"{policy.replace(' ', '-')}-{number}"
                    with _gateway(folder / run, claims, triton, adapters, policy) as port:
                        asyncio.run(_replay(port, conversations, run, seen[policy]))
                    found = seen[policy]
                    told = f"{found.reused / found.prompt:.1%} reused"
                    print(f"{run}: {told}", file=sys.stderr, flush=True)
    print("| chosen by | requests | prompt tokens | reused | first token p50 ms | p99 ms |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    for policy, found in seen.items():
        p50, p99 = (1e3 * percentile(found.first, percent) for percent in (50, 99))
        tokens = f"{found.prompt:,} | {found.reused / found.prompt:.1%}"
        print(f"| {policy} | {len(found.first):,} | {tokens} | {p50:,.0f} | {p99:,.0f} |")


if __name__ == "__main__":
    main()
