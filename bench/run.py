"""Load on the real local stack: tokens per second, and what the gateway itself costs.

    python bench/run.py [--json FILE]

Starts `gateway up` on the demo model and streams chats that count ("Count from 1 to 300") through
it at each level of concurrency. CPU times are those of the gateway process and of Triton with its
Python stubs, from the operating system's accounts, so they stay comparable on a noisy machine;
tokens per second are bounded by the CPU executor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
import psutil

BODY = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Count from 1 to 300"}],
    "max_tokens": 256,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}
LEVELS = (1, 8, 32)


@dataclass(frozen=True)
class Row:
    """One level of concurrency. Times in milliseconds, CPU in microseconds per token."""

    concurrent: int
    requests: int
    tokens: int
    tokens_per_second: float
    first_token_p50_ms: float
    first_token_p99_ms: float
    between_tokens_p50_ms: float
    gateway_cpu_us_per_token: float
    triton_cpu_us_per_token: float


@dataclass(frozen=True)
class Sample:
    tokens: int
    first_token_s: float
    gaps_s: list[float]


async def _chat(client: httpx.AsyncClient, url: str) -> Sample:
    started = last = time.perf_counter()
    first, gaps, tokens = 0.0, [], 0
    async with client.stream("POST", url, json=BODY) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            chunk = orjson.loads(line[6:])
            if chunk["usage"]:
                tokens = chunk["usage"]["completion_tokens"]
            elif chunk["choices"][0]["delta"].get("content"):
                if first:
                    gaps.append(now - last)
                else:
                    first = now - started
                last = now
    return Sample(tokens, first, gaps)


def _cpu_s(pid: int) -> float:
    """User and system time of a process and its children so far, in seconds."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(t.user + t.system for t in (p.cpu_times() for p in family))


async def _level(state: dict[str, Any], concurrent: int, rounds: int) -> Row:
    url = state["gateway"] + "/v1/chat/completions"
    pids = state["pids"]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=300, limits=limits) as client:
        await asyncio.gather(*[_chat(client, url) for _ in range(concurrent)])  # warm-up

        async def worker() -> list[Sample]:
            return [await _chat(client, url) for _ in range(rounds)]

        before = _cpu_s(pids["gateway"]), _cpu_s(pids["triton"])
        started = time.perf_counter()
        batches = await asyncio.gather(*[worker() for _ in range(concurrent)])
        seconds = time.perf_counter() - started
        after = _cpu_s(pids["gateway"]), _cpu_s(pids["triton"])
    samples = [sample for batch in batches for sample in batch]
    tokens = sum(sample.tokens for sample in samples)
    firsts = sorted(sample.first_token_s for sample in samples)
    gaps = [gap for sample in samples for gap in sample.gaps_s]
    return Row(
        concurrent=concurrent,
        requests=len(samples),
        tokens=tokens,
        tokens_per_second=tokens / seconds,
        first_token_p50_ms=1e3 * statistics.median(firsts),
        first_token_p99_ms=1e3 * firsts[max(0, int(len(firsts) * 0.99) - 1)],
        between_tokens_p50_ms=1e3 * statistics.median(gaps),
        gateway_cpu_us_per_token=1e6 * (after[0] - before[0]) / tokens,
        triton_cpu_us_per_token=1e6 * (after[1] - before[1]) / tokens,
    )


def _table(rows: list[Row]) -> str:
    heads = list(asdict(rows[0]))
    lines = ["| " + " | ".join(h.replace("_", " ") for h in heads) + " |"]
    lines.append("|" + " ---: |" * len(heads))
    for row in rows:
        cells = [f"{v:.1f}" if isinstance(v, float) else str(v) for v in asdict(row).values()]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready:"):
            return
    raise SystemExit(f"gateway up ended with code {process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="chats per client and level")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gateway-bench-") as folder:
        command = [sys.executable, "-m", "gateway", "up", "--port", "0", "--state-dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            _wait_until_ready(process)
            state = json.loads((Path(folder) / "state.json").read_text())
            rows = [asyncio.run(_level(state, n, options.rounds)) for n in LEVELS]
        finally:
            process.terminate()
            process.wait()
    print(_table(rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
