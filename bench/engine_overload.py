"""Goodput of an overloaded engine, with the gateway's early refusal of requests on and off.

    python -m bench.engine_overload [--seconds 45] [--settle 15] [--times 1 2 5]

A real Triton serves the synthetic engine, which runs 16 requests at once. A request gets its first
token after 100 ms, then 20 tokens a second. The command first measures the engine's capacity, in
tokens per second with all slots in use. Then it generates two kinds of load:

- Three tenants send requests for 20 to 60 tokens at random times. In successive windows, they
  request once, twice and five times the capacity in total.
- One tenant requests three fifths of the capacity. A second tenant of lower priority requests four
  times the capacity.

Each load is sent through two gateways: one with GATEWAY_REFUSE_EARLY off, one with it on. Goodput
is the number of tokens per second on streams whose first token came within 2 s. The limit is 15 s
for the tenant of lower priority.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import report
from bench.load import LETTER, Clients
from bench.machine import cores_for
from bench.measure import percentile
from bench.servers import MAX_SEQ_LEN, MODEL, Bench, started_triton
from gateway.config.tenants import key_hash
from ops.local_stack.ports import LOCALHOST, PortClaims
from ops.local_stack.process import adopt_orphans
from ops.local_stack.repository import PARAMETERS
from triton_repo.cpu_executor import synthetic
from triton_repo.render import render

PLACES, BATCH = 20, 16  # the gateway allows 5/4 of the engine's batch in flight
FIRST_MS, PER_S = 100, 20
LENGTHS = range(20, 61)
WITHIN_S = 2.0
BATCH_WITHIN_S = 15.0
_REFUSED = 503
TENANTS = ("one", "two", "three")


@dataclass
class Asked:
    """A request and the times of its events.

    Times are seconds of the monotonic clock, and 0 for events that have not happened.
    """

    tenant: str
    sent: float
    status: int = 0
    told: float = 0.0
    first: float = 0.0
    tokens: list[float] = field(default_factory=list)

    def in_time(self, within_s: float) -> bool:
        return bool(self.first) and self.first - self.sent <= within_s


async def _ask(port: int, asked: Asked, tokens: int) -> None:
    """Send a request for `tokens` tokens, and record the times of its events in `asked`.

    Each request opens its own socket, because the connection pools of client libraries are slow
    with a thousand connections.
    """
    body = {"model": "demo", "prompt": "x", "max_tokens": tokens, "stream": True}
    sent = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(LOCALHOST, port)
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nhost: {LOCALHOST}\r\nconnection: close\r\n"
        f"authorization: Bearer {asked.tenant}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(sent)}\r\n\r\n".encode()
        + sent
    )
    try:
        async for line in reader:
            now = time.monotonic()
            if not asked.status:
                asked.status, asked.told = int(line.split()[1]), now
            if count := line.count(LETTER):
                asked.first = asked.first or now
                asked.tokens += [now] * count
    finally:
        writer.close()


async def _arrivals(port: int, tenant: str, per_s: float, end: float, seen: list[Asked]) -> None:
    """Send requests at random times until `end`, without waiting for earlier answers."""
    chance = random.Random(tenant)
    tasks = set()
    moment = time.monotonic()
    while (moment := moment + chance.expovariate(per_s)) < end:
        await asyncio.sleep(moment - time.monotonic())
        asked = Asked(tenant, time.monotonic())
        seen.append(asked)
        tasks.add(asyncio.create_task(_ask(port, asked, chance.choice(LENGTHS))))
    # Do not cancel the unfinished requests yet: the first tokens of the latest ones may still
    # arrive in time.
    await asyncio.sleep(BATCH_WITHIN_S if tenant == "batch" else WITHIN_S)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Window:
    """A measurement window of `seconds` seconds, which starts at the monotonic time `begin`.

    `seen` has all requests, including those that were sent before or after the window.
    """

    seen: list[Asked]
    begin: float
    seconds: float

    @property
    def end(self) -> float:
        return self.begin + self.seconds

    def of(self, *tenants: str) -> list[Asked]:
        return [a for a in self.seen if self.begin <= a.sent < self.end and a.tenant in tenants]

    def tokens_per_s(self, within_s: float, *tenants: str) -> float:
        """Return the goodput of these tenants in tokens per second.

        Only streams whose first token arrived within `within_s` seconds count.
        """
        good = [a for a in self.seen if a.tenant in tenants and a.in_time(within_s)]
        inside = [self.begin <= at < self.end for a in good for at in a.tokens]
        return sum(inside) / self.seconds

    def row(self, within_s: float, capacity: float, *tenants: str) -> dict[str, Any]:
        asked = self.of(*tenants)
        served = [a for a in asked if a.first]
        refused = [a for a in asked if a.status == _REFUSED]
        first = [a.first - a.sent for a in served]
        in_time = sum(a.in_time(within_s) for a in asked)
        return {
            "asked/s": len(asked) / self.seconds,
            "goodput % of capacity": 100 * self.tokens_per_s(within_s, *tenants) / capacity,
            "first token in time, % of asked": 100 * in_time / max(1, len(asked)),
            "% of served": 100 * in_time / max(1, len(served)),
            "first token p50 s": percentile(first, 50),
            "p99 s": percentile(first, 99),
            "refused %": 100 * len(refused) / max(1, len(asked)),
            "after p50 s": percentile([a.told - a.sent for a in refused], 50),
        }


async def _window(port: int, rates: dict[str, float], settle_s: float, seconds: float) -> Window:
    begin = time.monotonic() + settle_s
    seen: list[Asked] = []
    async with asyncio.TaskGroup() as tasks:
        for tenant, per_s in rates.items():
            tasks.create_task(_arrivals(port, tenant, per_s, begin + seconds, seen))
    return Window(seen, begin, seconds)


async def _capacity(port: int, seconds: float) -> float:
    """Return the engine's capacity: the tokens per second while all of its slots are in use."""
    begin = time.monotonic() + 3
    seen: list[Asked] = []
    chance = random.Random(0)

    async def one(tenant: str) -> None:
        while time.monotonic() < begin + seconds:
            seen.append(Asked(tenant, time.monotonic()))
            await _ask(port, seen[-1], chance.choice(LENGTHS))

    async with asyncio.TaskGroup() as tasks:
        for number in range(PLACES):
            tasks.create_task(one(TENANTS[number % len(TENANTS)]))
    return Window(seen, begin, seconds).tokens_per_s(60.0, *TENANTS)


def _config(folder: Path) -> Path:
    tenants: list[dict[str, Any]] = [
        {"name": name, "first_token_within": WITHIN_S} for name in TENANTS
    ]
    tenants.append({"name": "batch", "priority": -10, "first_token_within": BATCH_WITHIN_S})
    for tenant in tenants:
        tenant |= {"keys": [key_hash(tenant["name"])], "models": ["*"]}
    path = folder / "tenants.yaml"
    path.write_text(json.dumps({"tenants": tenants}))
    return path


@contextlib.contextmanager
def _engine(folder: Path, claims: PortClaims) -> Iterator[str]:
    synthetic.build(
        folder / "engine",
        vocab_size=4096,
        tokens=[96],  # the letter ~
        first_token_ms=FIRST_MS,
        tokens_per_second=PER_S,
        max_batch_size=BATCH,
        max_seq_len=MAX_SEQ_LEN,
    )
    parameters: dict[str, Any] = {
        **{name: PARAMETERS[name] for name in PARAMETERS if "instance_count" not in name},
        "triton_max_batch_size": 4 * BATCH,
        "engine_dir": str(folder / "engine"),
        "tokenizer_dir": str(MODEL),
    }
    render(folder / "repository", parameters, ["tensorrt_llm"])
    with started_triton(folder, claims) as triton:
        yield triton.grpc


def measure(bench: Bench, triton: str, options: argparse.Namespace) -> None:
    """Run all measurements and print their tables."""
    rows, last = [], []
    config = {"GATEWAY_CONFIG": str(_config(bench.folder)), "GATEWAY_LOG_LEVEL": "warning"}
    off = {**config, "GATEWAY_REFUSE_EARLY": "false"}
    with (
        bench.gateway(triton, name="off", settings=off) as without,
        bench.gateway(triton, name="on", settings=config) as with_it,
    ):
        sides = {"off": without.port, "on": with_it.port}
        capacity = asyncio.run(_capacity(with_it.port, options.seconds / 2))
        mean = sum(LENGTHS) / len(LENGTHS)
        bench.log(f"capacity: {capacity:.0f} tokens/s, {capacity / mean:.1f} answers/s")
        for times in options.times:
            rates = dict.fromkeys(TENANTS, times * capacity / mean / len(TENANTS))
            for early, port in sides.items():
                seen = asyncio.run(_window(port, rates, options.settle, options.seconds))
                row = {"asked": f"{times:g} x", "refuse early": early}
                rows.append(row | seen.row(WITHIN_S, capacity, *TENANTS))
                bench.log(report.table(rows[-1:]).splitlines()[-1])
        rates = {"one": 0.6 * capacity / mean, "batch": 4 * capacity / mean}
        for early, port in sides.items():
            seen = asyncio.run(_window(port, rates, options.settle, options.seconds))
            for tenant, within_s in {"one": WITHIN_S, "batch": BATCH_WITHIN_S}.items():
                row = {"tenant": tenant, "refuse early": early}
                last.append(row | seen.row(within_s, capacity, tenant))
                bench.log(report.table(last[-1:]).splitlines()[-1])
    print(report.table(rows), end="\n\n")
    print(report.table(last))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--settle", type=float, default=15.0)
    parser.add_argument("--times", type=float, nargs="+", default=[1, 2, 5])
    options = parser.parse_args()
    adopt_orphans()
    cores = cores_for(1)
    with (
        tempfile.TemporaryDirectory(prefix="overload-") as folder,
        PortClaims() as claims,
        contextlib.closing(Clients(cores.client)) as clients,
    ):
        bench = Bench(
            folder=Path(folder),
            claims=claims,
            cores=cores,
            clients=clients,
            seconds=options.seconds,
            quick=False,
        )
        with _engine(bench.folder, claims) as triton:
            measure(bench, triton, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
