"""Benchmark of a new request's first-token latency while other streams are running.

The other streams receive one token every 20 ms. Two gateways are measured in alternating windows. A
window has two phases. In the first phase, only these streams run, and the gateway's CPU time per
token is measured. In the second phase, a client also sends requests for one token on a persistent
connection, and measures the latency. The client pauses for 20 ms after each response, because
requests without a pause would keep the gateway's core busy. Each pair of windows gives a ratio of
the gateways' CPU times, and the table shows the median ratio.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from bench.load import Load, total
from bench.measure import chat, percentile, wait_until
from bench.pace import BURST
from bench.peer import Peer, check
from bench.servers import Bench, Server, Unmeasured
from bench.smg import smg

STREAMS = (0, 100, 500)
QUICK_STREAMS = (0, 5, 20)
"""Numbers of concurrent streams with `--quick`: few enough for a busy machine."""
_BEAT_MS, _PROMPT_TOKENS = 20, 64
_ROUNDS, _QUICK_ROUNDS = 3, 1
_STREAMS_PER_SECOND, _SETTLE_S = 500, 0.7
_PAUSE_S, _WARM_S = 0.02, 0.2


@dataclass
class _Figures:
    """Measurements of one server with a fixed number of streams.

    Each list has one entry per window. The latencies are those of first tokens.
    """

    p50_ms: list[float] = field(default_factory=list)
    p99_ms: list[float] = field(default_factory=list)
    us_per_token: list[float] = field(default_factory=list)


def beside(bench: Bench) -> list[dict[str, Any]]:
    """Return the table's rows: one for each server with each number of streams.

    The servers are this project's gateway and SMG, a gateway written in Rust. SMG is left out if it
    is unavailable.
    """
    with contextlib.ExitStack() as stack:
        triton = stack.enter_context(bench.upstream())
        servers = [stack.enter_context(bench.gateway(triton))]
        check(Peer(servers[0], None))
        try:
            other = stack.enter_context(smg(bench))
            check(other)
            servers.append(other.server)
        except Unmeasured as error:
            bench.notes.append(f"beside: SMG: not measured: {error}")
        return compare(bench, servers)


def compare(bench: Bench, servers: list[Server]) -> list[dict[str, Any]]:
    """Measure `servers` in alternating windows, and return the table's rows.

    The last server in `servers` is the reference. A row of another server has a ratio: this
    server's CPU time per token, divided by the reference's. Raises Unmeasured if a request failed.
    """
    counts = QUICK_STREAMS if bench.quick else STREAMS
    figures = {server.name: {count: _Figures() for count in counts} for server in servers}
    for number in range(bench.rounds or (_QUICK_ROUNDS if bench.quick else _ROUNDS)):
        for count in counts:
            for server in servers:
                _measure(bench, server, count, figures[server.name][count])
        bench.log(f"beside: round {number + 1}")
    reference = servers[-1].name
    return [
        _row(name, count, by_count, figures[reference] if name != reference else None, reference)
        for name, by_count in figures.items()
        for count in counts
    ]


def _measure(bench: Bench, server: Server, streams: int, figures: _Figures) -> None:
    ramp_s = streams / _STREAMS_PER_SECOND
    begin = time.monotonic() + ramp_s + _SETTLE_S
    # Measure the CPU time over `bench.seconds`: the operating system counts it in steps of 10 ms,
    # so a short measurement would be inaccurate.
    middle = begin + (bench.seconds if streams else 0.0)
    end = middle + _WARM_S + bench.seconds / 2
    paced = Load(
        port=server.port,
        path=server.path,
        body=server.body(chat(seed=_BEAT_MS)),
        streams=streams,
        ramp_s=ramp_s,
        begin=begin,
        end=end,
        is_patient=True,
    )
    asking = replace(
        paced,
        body=server.body(chat(seed=BURST, tokens=1, prompt_tokens=_PROMPT_TOKENS)),
        streams=1,
        ramp_s=0.0,
        begin=middle + _WARM_S,
        pause_s=_PAUSE_S,
    )
    shares = bench.clients.start(paced) if streams else []
    wait_until(begin)
    before = server.cpu_s()
    wait_until(middle)
    cpu_s = server.cpu_s() - before
    first = total(bench.clients.start(asking))
    seen = total(shares)
    if errors := seen.errors + first.errors:
        raise Unmeasured(f"{server.name}, {streams} streams: {errors[0]}")
    figures.p50_ms.append(1e3 * percentile(first.first, 50))
    figures.p99_ms.append(1e3 * percentile(first.first, 99))
    # Estimate the number of tokens until `middle`, because `cpu_s` was measured until `middle`, but
    # `seen.tokens` was counted until `end`. The upstream sends tokens at a constant rate.
    tokens = seen.tokens * (middle - begin) / (end - begin)
    figures.us_per_token.append(1e6 * cpu_s / tokens if tokens else math.nan)


def _row(
    name: str,
    streams: int,
    by_count: dict[int, _Figures],
    reference: dict[int, _Figures] | None,
    of: str,
) -> dict[str, Any]:
    own, alone = by_count[streams], by_count[0]
    pairs = zip(own.p50_ms, alone.p50_ms, strict=True)
    row = {
        "who": name,
        "other streams": streams,
        "first token p50 ms": median(own.p50_ms),
        "more than alone": median(one - other for one, other in pairs),
        "p99 ms": median(own.p99_ms),
        "CPU us/token": median(own.us_per_token),
    }
    ratio = math.nan
    if reference is not None:
        theirs = reference[streams].us_per_token
        ratio = median(one / other for one, other in zip(own.us_per_token, theirs, strict=True))
    return row | {f"of {of}": ratio}
