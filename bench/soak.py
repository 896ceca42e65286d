"""Soak test over hours: does memory, or the number of open files, grow?

    python -m bench.soak [--minutes 30] [--clients 24] [--out DIR]

The command starts the local stack (a real Triton, Redis and the gateway). Clients send requests
without a pause: complete answers, streams, disconnects and invalid requests, with and without
adapters. Memory and open files of each server are recorded every second. The processes of Triton's
models count as a server of their own. The command writes `soak.csv` and `soak.svg` into DIR. The
exit code is 1 if a server was significantly larger in the last quarter of the time than in the
second.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench.machine import ROOT
from ops.loadtest.chart import COLOURS, Series, graph, linear, svg
from ops.local_stack.state import StackState

READY_WITHIN_S = 180
EVERY_S = 1.0
# Maximum growth that is not reported as a leak: a fraction of the resident memory, and a number of
# open files. Both vary without a leak, with the allocator's use and the number of connections.
RSS_SLACK, FILES_SLACK = 0.05, 16
# Colour of each sampled server. `triton` is the process tritonserver, which has the clients'
# connections. `models` are its child processes, which run the models.
_COLOURS = dict(zip(("gateway", "triton", "models", "redis"), COLOURS, strict=False))


@dataclass(frozen=True)
class ResourceSample:
    """Resident memory in bytes and number of open file descriptors of a server at one time."""

    seconds: float
    server: str
    rss: int
    files: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("build/soak"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        command = [sys.executable, "-m", "ops", "up", "--port", "0", "--state-dir", folder]
        environment = os.environ | {"GATEWAY_LOG_LEVEL": "warning"}
        with (options.out / "stack.log").open("wb") as log:
            up = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT)
        try:
            state = _state(up, Path(folder))
            seconds = 60 * options.minutes
            samples, outcomes = asyncio.run(_soak(state, options.clients, seconds))
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(60)
    with (options.out / "soak.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["seconds", "server", "rss_bytes", "open_files"])
        for each in samples:
            writer.writerow([f"{each.seconds:.1f}", each.server, each.rss, each.files])
    (options.out / "soak.svg").write_text(plot(samples), encoding="utf-8")
    print("outcomes:", dict(outcomes))
    grown = [line for server in _COLOURS for line in growth(server, samples, outcomes.total())]
    return 1 if grown else 0


def _state(up: subprocess.Popen[bytes], folder: Path) -> StackState:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline and up.poll() is None:
        with suppress(OSError, ValueError, httpx.TransportError):
            state = StackState.read(folder)
            if httpx.get(f"{state.gateway}/health/ready").status_code == 200:
                return state
        time.sleep(0.2)
    raise SystemExit("the stack did not start; see stack.log")


async def _soak(
    state: StackState, clients: int, seconds: float
) -> tuple[list[ResourceSample], Counter[str]]:
    outcomes: Counter[str] = Counter()
    ends = time.monotonic() + seconds
    tasks = [
        asyncio.create_task(_client(state.gateway, number, ends, outcomes))
        for number in range(clients)
    ]
    samples: list[ResourceSample] = []
    started = time.monotonic()
    while time.monotonic() < ends:
        for server, processes in _processes(state).items():
            rss, files = _footprint(processes)
            samples.append(ResourceSample(time.monotonic() - started, server, rss, files))
        await asyncio.sleep(EVERY_S)
    await asyncio.gather(*tasks)
    return samples, outcomes


def _processes(state: StackState) -> dict[str, list[psutil.Process]]:
    gateway, triton, redis = (psutil.Process(state.pids[n]) for n in ("gateway", "triton", "redis"))
    return {
        "gateway": [gateway, *gateway.children(recursive=True)],
        "triton": [triton],
        "models": triton.children(recursive=True),
        "redis": [redis],
    }


def _footprint(processes: Sequence[psutil.Process]) -> tuple[int, int]:
    rss = files = 0
    for member in processes:
        with suppress(psutil.NoSuchProcess):
            rss += member.memory_info().rss
            files += member.num_fds()
    return rss, files


async def _client(url: str, number: int, ends: float, outcomes: Counter[str]) -> None:
    chance = random.Random(number)
    while time.monotonic() < ends:
        # Send at most ten requests on a connection, because real clients come and go.
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            for _ in range(chance.randint(1, 10)):
                outcomes[await _ask(client, chance)] += 1


async def _ask(client: httpx.AsyncClient, chance: random.Random) -> str:
    """Send one random request. Return its outcome, such as `left` if the client disconnected."""
    if chance.random() < 0.05:
        wrong = await client.post("/v1/completions", json={"model": "nobody", "prompt": "x"})
        return f"refused with {wrong.status_code}"
    leaves_s = chance.uniform(0.01, 1) if chance.random() < 0.1 else None
    body = {
        "model": chance.choice(["demo", "zh", "ja"]),
        "messages": [{"role": "user", "content": f"Count from 1 to {chance.randint(5, 80)}"}],
        "max_tokens": chance.randint(1, 200),
        "stream": chance.random() < 0.5,
    }
    try:
        async with (
            asyncio.timeout(leaves_s),
            client.stream("POST", "/v1/chat/completions", json=body) as answer,
        ):
            await answer.aread()
            return f"answered with {answer.status_code}"
    except TimeoutError:
        return "left"


def growth(server: str, samples: Sequence[ResourceSample], requests: int) -> list[str]:
    """Compare a server's memory and open files in the second and the last quarter of the run.

    Print the medians of both quarters. Return the names of the figures that grew by more than the
    tolerance. `requests` is the number of requests in the complete run. The printed growth per
    request assumes that half of the requests were sent between the two medians.
    """
    mine = [each for each in samples if each.server == server]
    quarter = max(1, len(mine) // 4)
    early, late = mine[quarter : 2 * quarter] or mine, mine[-quarter:]
    rss = [statistics.median(each.rss for each in part) for part in (early, late)]
    files = [statistics.median(each.files for each in part) for part in (early, late)]
    print(
        f"{server}: RSS {rss[0] / 2**20:.1f} -> {rss[1] / 2**20:.1f} MiB, "
        f"open files {files[0]:.0f} -> {files[1]:.0f} (medians of the second and last quarter), "
        f"{(rss[1] - rss[0]) / 2**10 / max(1, requests / 2):+.2f} KiB a request"
    )
    grown = []
    if rss[1] > rss[0] * (1 + RSS_SLACK):
        grown.append("RSS")
    if files[1] > files[0] + FILES_SLACK:
        grown.append("open files")
    return grown


def plot(samples: Sequence[ResourceSample]) -> str:
    """Return an SVG that plots resident memory and open files over time, a line per server."""
    return svg(
        [
            _over_time("resident memory", "MiB", samples, lambda each: each.rss / 2**20),
            _over_time("open files", "", samples, lambda each: each.files),
        ],
        down=True,
    )


def _over_time(
    title: str,
    unit: str,
    samples: Sequence[ResourceSample],
    value: Callable[[ResourceSample], float],
) -> str:
    lines = [
        Series(server, colour, [(e.seconds / 60, value(e)) for e in samples if e.server == server])
        for server, colour in _COLOURS.items()
    ]
    minutes = linear([each.seconds / 60 for each in samples])
    return graph(title, "minutes", unit, lines, minutes, linear(list(map(value, samples))))


if __name__ == "__main__":
    sys.exit(main())
