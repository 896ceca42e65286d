"""Benchmark of overload: the throughput of useful tokens, and the time until requests are refused.

In the first measurements, the gateway's CPU core is the bottleneck. A closed loop measures how many
requests per second the gateway can serve. Three tenants then send more requests than that in an
open loop, for answers of 64 tokens at a fixed pace. Four windows are measured:

- three times as many requests as the gateway can serve
- ten times as many
- three times as many, and a fourth tenant whose answers are ten times slower
- three times as many, and 200 streams that started before the window and do not end in it

The gateway SMG gets the same loads.

In the last measurement, the engines are the bottleneck. One tenant requests three times the
engines' capacity, and two other tenants request a tenth of the capacity each.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import open_loop
from bench.measure import TOKENS_FOR_EVER, chat, percentile, wait_until, window
from bench.open_loop import OpenLoad, Outcome, Outcomes, Tenant
from bench.servers import Bench, Server, Unmeasured
from bench.smg import smg
from gateway.config.tenants import key_hash

Row = dict[str, Any]

TENANTS = ("one", "two", "three")
SLOW, BEFORE, CLOSED = "slow", "before", "unused"
FLOOD, OTHERS = "flood", ("quiet", "calm")
TOKENS, BEAT_MS, SLOW_BEAT_MS = 64, 20, 200
PROMPT_TOKENS = 16
CLOSED_STREAMS = (1024, 832, 704, 448, 256, 128)
WARM_UP_STREAMS = 64
BEFORE_STREAMS = 200
ENGINE_PLACES = 20
_WINDOW_S, _QUICK_S = 4.5, 2.5
_SETTLE_S, _LEAD_S = 3.0, 0.5
_ENGINE_WINDOW_S, _ENGINE_SETTLE_S, _ENGINE_TAIL_S = 12.0, 12.0, 12.0
_PROMPT_REFUSAL_S = 0.1


def overload(bench: Bench) -> list[Row]:
    """Return the table's rows.

    In the first rows, the gateway's CPU core is overloaded. In the others, the engines are.
    """
    config = {
        "GATEWAY_CONFIG": str(_config(bench.folder)),
        "GATEWAY_LOG_LEVEL": "warning",
    }
    with bench.upstream() as triton:
        return [*_own_core(bench, triton, config), *_engines(bench, triton, config)]


def _own_core(bench: Bench, triton: str, config: dict[str, str]) -> list[Row]:
    """Overload the CPU core of the gateway, then that of SMG, and return the table's rows."""
    # Give the engines so many slots that the gateway's core is the bottleneck.
    settings = config | {"GATEWAY_REPLICA_IN_FLIGHT": "100000"}
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(bench.gateway(triton, settings=settings))]
        try:
            servers.append(stack.enter_context(smg(bench)).server)
        except Unmeasured as error:
            bench.notes.append(f"overload: SMG: not measured: {error}")
        carried = {server.name: _closed(bench, server) for server in servers}
        per_s = carried[servers[0].name] / TOKENS
        rows = [
            {"who": server.name, "asked": "closed loop"}
            | dict.fromkeys(_figures(Outcome(), 1.0, 1.0), math.nan)
            | {"useful tokens/s": carried[server.name]}
            for server in servers
        ]
        for what, times, extra in (
            ("3 x", 3.0, ""),
            ("10 x", 10.0, ""),
            ("3 x, and a slow tenant", 3.0, SLOW),
            (f"3 x, {BEFORE_STREAMS} streams began before", 3.0, BEFORE),
        ):
            tenants = _tenants(times * per_s, extra)
            for server in servers:
                outcomes, cores = _open(bench, server, tenants)
                figures = _figures(_joined(outcomes), _seconds(bench), carried[server.name])
                rows.append({"who": server.name, "asked": what} | figures | cores)
                bench.log(f"overload: {what}: {server.name}")
    return rows


def _engines(bench: Bench, triton: str, config: dict[str, str]) -> list[Row]:
    """Overload engines with few slots, and return two rows.

    The first row is for the tenant that sends too many requests, the second for the other tenants.
    """
    settings = config | {"GATEWAY_REPLICA_IN_FLIGHT": str(ENGINE_PLACES)}
    carried = ENGINE_PLACES / (TOKENS * BEAT_MS / 1000)
    body = chat(seed=BEAT_MS, tokens=TOKENS, prompt_tokens=PROMPT_TOKENS)
    tenants = [
        Tenant(name=FLOOD, body=body, per_s=3 * carried),
        *[Tenant(name=name, body=body, per_s=0.1 * carried) for name in OTHERS],
    ]
    with bench.gateway(triton, name="few-places", settings=settings) as server:
        outcomes, cores = _open(
            bench,
            server,
            tenants,
            seconds=_ENGINE_WINDOW_S,
            settle_s=_ENGINE_SETTLE_S,
            tail_s=_ENGINE_TAIL_S,
        )
    rows = []
    for what, names in (("3 x the engines: one tenant", (FLOOD,)), ("others beside it", OTHERS)):
        whole = _joined({name: outcomes[name] for name in names})
        figures = _figures(whole, _ENGINE_WINDOW_S, carried * TOKENS)
        rows.append({"who": server.name, "asked": what} | figures | cores)
    return rows


def _closed(bench: Bench, server: Server) -> float:
    """Return the server's capacity in tokens per second, measured in a closed loop.

    The numbers of streams in `CLOSED_STREAMS` are tried from the largest to the smallest, until the
    server refuses no request. Raises Unmeasured if the server refuses requests even with the
    smallest number.
    """
    body = chat(seed=BEAT_MS, tokens=TOKENS, prompt_tokens=PROMPT_TOKENS)
    # Warm up with a small loop, because the first requests of a process take longer. Without the
    # warm-up, requests of a large loop would be refused.
    window(bench, server, body, WARM_UP_STREAMS, seconds=_seconds(bench))
    for streams in CLOSED_STREAMS:
        try:
            seen = window(bench, server, body, streams, seconds=_seconds(bench), settle_s=_SETTLE_S)
        except Unmeasured as error:
            bench.log(f"overload: {error}")
        else:
            bench.log(f"overload: closed loop of {streams}: {server.name}")
            return seen.seen.tokens / seen.seconds
    raise Unmeasured(f"{server.name} refuses streams of a closed loop")


def _tenants(per_s: float, extra: str) -> list[Tenant]:
    names = [*TENANTS, SLOW] if extra == SLOW else TENANTS
    tenants = []
    for name in names:
        beat_ms = SLOW_BEAT_MS if name == SLOW else BEAT_MS
        body = chat(seed=beat_ms, tokens=TOKENS, prompt_tokens=PROMPT_TOKENS)
        tenants.append(Tenant(name=name, body=body, per_s=per_s / len(names)))
    if extra == BEFORE:
        body = chat(seed=BEAT_MS, tokens=TOKENS_FOR_EVER, prompt_tokens=PROMPT_TOKENS)
        per_s = BEFORE_STREAMS / (_SETTLE_S + _LEAD_S)
        tenants.append(Tenant(name=BEFORE, body=body, per_s=per_s, before=True))
    return tenants


def _open(
    bench: Bench,
    server: Server,
    tenants: Sequence[Tenant],
    *,
    seconds: float | None = None,
    settle_s: float = _SETTLE_S,
    tail_s: float = open_loop.TAIL_S,
) -> tuple[Outcomes, Row]:
    """Send the tenants' requests in an open loop.

    Return the outcomes by tenant, and a dict with two columns of the table: the CPU use of the
    server and of the busiest client process, in percent of one core.

    The window lasts `seconds` and starts `settle_s` + `_LEAD_S` seconds after the call.
    """
    seconds = seconds or _seconds(bench)
    begin = time.monotonic() + settle_s + _LEAD_S
    load = OpenLoad(
        port=server.port,
        path=server.path,
        tenants=tuple(
            Tenant(name=t.name, body=server.body(t.body), per_s=t.per_s, before=t.before)
            for t in tenants
        ),
        begin=begin,
        end=begin + seconds,
        tail_s=tail_s,
    )
    shares = open_loop.start(bench.clients, load)
    wait_until(begin)
    before = server.cpu_s()
    wait_until(load.end)
    cpu_s = server.cpu_s() - before
    outcomes, busy = open_loop.total(shares)
    for text in sorted({text for outcome in outcomes.values() for text in outcome.errors})[:3]:
        bench.log(f"overload: {server.name}: {text}")
    return outcomes, {"core %": 100 * cpu_s / seconds, "client core %": 100 * busy}


def _joined(outcomes: Outcomes) -> Outcome:
    whole = Outcome()
    for outcome in outcomes.values():
        whole.add(outcome)
    return whole


def _figures(whole: Outcome, seconds: float, carried: float) -> Row:
    asked, refused = max(1, whole.asked), max(1, len(whole.refused))
    prompt = sum(took <= _PROMPT_REFUSAL_S for took in whole.refused)
    return {
        "asked/s": whole.asked / seconds,
        "useful tokens/s": whole.useful / seconds,
        "% of what is carried": 100 * whole.useful / seconds / carried,
        "first token p50 ms": 1e3 * percentile(whole.first, 50),
        "p99 ms": 1e3 * percentile(whole.first, 99),
        "served %": 100 * len(whole.first) / asked,
        "refused %": 100 * len(whole.refused) / asked,
        "within 100 ms, % of refused": 100 * prompt / refused if whole.refused else math.nan,
        "refusal p99 ms": 1e3 * percentile(whole.refused, 99),
        "neither": whole.asked - len(whole.first) - len(whole.refused),
        "core %": math.nan,
        "client core %": math.nan,
    }


def _seconds(bench: Bench) -> float:
    return _QUICK_S if bench.quick else _WINDOW_S


def _config(folder: Path) -> Path:
    """Write a configuration with all tenants, and return its path.

    A tenant's name is also its API key.
    """
    names = (*TENANTS, SLOW, BEFORE, CLOSED, FLOOD, *OTHERS)
    tenants = [{"name": name, "keys": [key_hash(name)], "models": ["*"]} for name in names]
    path = folder / "overload.yaml"
    path.write_text(json.dumps({"tenants": tenants}))
    return path
