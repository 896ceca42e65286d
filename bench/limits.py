"""Benchmark of the cost of tenants' limits: CPU time and throughput with and without limits.

The gateway is measured with one worker, then with eight workers (two on a machine with few cores).
The workers share the counters of the limits in a real Redis. The requests are chats of one token.
The last column checks that a limit is exact: a tenant with a limit of 60 requests a minute sends 61
requests, and the column has the number of accepted requests. Each of the 61 requests opens a new
connection, so that any worker may receive it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import redis

from bench.load import Clients
from bench.machine import cores_for
from bench.measure import Window, chat, window
from bench.pace import BURST
from bench.servers import Bench, Server, Unmeasured
from gateway.config.tenants import key_hash
from ops.local_stack.ports import LOCALHOST

_ROUNDS, _QUICK_ROUNDS = 4, 2
_STREAMS = 64
_FREE, _LIMITED, _SMALL = "unlimited", "limited", "small"
_SMALL_LIMIT = 60
# Limits slightly above what eight workers can serve. Such limits are the expensive case: near a
# limit, a worker reserves fewer requests and tokens with each call of Redis.
_LIMITS = {
    "requests_per_minute": 2_000_000,
    "tokens_per_minute": 200_000_000,
    "concurrent_requests": 4096,
    "tokens_per_day": 10**12,
}


class _Round(NamedTuple):
    """Results of one measurement window, and the CPU seconds that Redis used in the window."""

    seen: Window
    redis_s: float

    @property
    def per_second(self) -> float:
        return self.seen.seen.finished / self.seen.seconds


def limits(bench: Bench) -> list[dict[str, Any]]:
    """Return a row for each number of workers. A value is the median of several windows."""
    available = len(os.sched_getaffinity(0))
    many = 8 if available >= 16 else 2
    if many < 8:
        bench.notes.append(f"limits: {available} cores are too few for 8 workers and their load.")
    rows = []
    for workers in (1, many):
        cores = cores_for(workers)
        here = replace(bench, cores=cores, clients=Clients(cores.client))
        try:
            rows.append(_row(here, workers))
        finally:
            here.clients.close()
    return rows


def _row(bench: Bench, workers: int) -> dict[str, Any]:
    free: list[_Round] = []
    limited: list[_Round] = []
    with _gateway(bench, workers) as (server, client):
        pair = [(_FREE, free), (_LIMITED, limited)]
        for _ in range(_QUICK_ROUNDS if bench.quick else _ROUNDS):
            for key, rounds in pair:
                rounds.append(_round(bench, replace(server, key=key), client, workers))
            pair.reverse()
        passed = _passed_of_one_more(server)
    pairs = [*zip(free, limited, strict=True)]
    background_s = statistics.median([one.redis_s for one in free])
    return {
        "workers": workers,
        "requests/s without": statistics.median([one.per_second for one in free]),
        "with limits": statistics.median([one.per_second for one in limited]),
        "of those without": statistics.median(
            [two.per_second / one.per_second for one, two in pairs]
        ),
        "CPU us/request without": statistics.median([one.seen.us_per_request for one in free]),
        "with limits ": statistics.median([one.seen.us_per_request for one in limited]),
        "of that without": statistics.median(
            [two.seen.us_per_request / one.seen.us_per_request for one, two in pairs]
        ),
        "Redis us/request": statistics.median(
            [
                1e6 * max(0.0, one.redis_s - background_s) / max(1, one.seen.seen.finished)
                for one in limited
            ]
        ),
        "Redis core %": statistics.median(
            [100 * one.redis_s / one.seen.seconds for one in limited]
        ),
        f"passed of {_SMALL_LIMIT + 1}": passed,
    }


@contextlib.contextmanager
def _gateway(bench: Bench, workers: int) -> Iterator[tuple[Server, Any]]:
    name = f"limits-{workers}"
    with (
        bench.upstream() as triton,
        bench.redis() as url,
        contextlib.closing(redis.Redis.from_url(url)) as client,
    ):
        client.flushall()  # remove the counters of the previous gateway
        settings = {
            "GATEWAY_REDIS_URL": url,
            "GATEWAY_CONFIG": str(_config(bench.folder)),
        }
        with bench.gateway(triton, workers=workers, name=name, settings=settings) as server:
            yield server, client


def _round(bench: Bench, server: Server, client: Any, workers: int) -> _Round:
    body = chat(seed=BURST, tokens=1)
    spent: list[float] = []

    def note_redis() -> None:
        cpu = client.info("cpu")
        spent.append(cpu["used_cpu_user"] + cpu["used_cpu_sys"])

    seen = window(bench, server, body, _STREAMS * workers, on_edge=note_redis)
    if not seen.seen.finished:
        raise Unmeasured("limits: no answer within a window")
    return _Round(seen, spent[1] - spent[0])


def _passed_of_one_more(server: Server) -> int:
    body = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 1, "seed": BURST})
    headers = {"authorization": f"Bearer {_SMALL}", "content-type": "application/json"}
    passed = 0
    for _ in range(_SMALL_LIMIT + 1):
        connection = http.client.HTTPConnection(LOCALHOST, server.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("POST", "/v1/completions", body, headers)
            passed += connection.getresponse().status == http.client.OK
    return passed


def _config(folder: Path) -> Path:
    tenants = [
        {"name": name, "keys": [key_hash(name)], "models": ["*"], **limited}
        for name, limited in (
            (_FREE, {}),
            (_LIMITED, _LIMITS),
            (_SMALL, {"requests_per_minute": _SMALL_LIMIT}),
        )
    ]
    path = folder / "limits.yaml"
    path.write_text(json.dumps({"tenants": tenants}))
    return path
