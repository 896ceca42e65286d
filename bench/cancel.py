"""Benchmark of the latency from a client's disconnect to the stop request at Triton.

100 other requests are streaming at the same time.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import orjson

from bench.grpc_server import MARKED
from bench.load import LETTER, Load, request, total
from bench.measure import chat, percentile, wait_until
from bench.pace import SILENT
from bench.servers import Bench, Server, Unmeasured
from ops.local_stack.ports import LOCALHOST

_BEAT_MS = 20
_BACKGROUND = 100
_LANES = 5
_AFTER_S = 0.15
_APART_S = 0.027
_PATIENCE_S = 60.0
"""Maximum seconds to wait for a line in the scripted Triton's event log."""
_PEER_PATIENCE_S = 5.0


@dataclass(frozen=True)
class _Kind:
    """A scenario: the phase of a request in which its client disconnects."""

    name: str
    seed: int
    stream: bool


KINDS = (
    _Kind("streaming", _BEAT_MS, True),
    _Kind("waiting for its first token", SILENT, True),
    _Kind("not streaming", _BEAT_MS, False),
)


def cancel(bench: Bench) -> list[dict[str, Any]]:
    """Return a row per scenario, with the latencies of the stop request and of the stream's reset.

    A latency is the time in milliseconds from the client's disconnect until the stop request, or
    the reset of the request's stream, arrives at Triton.
    """
    count = 20 if bench.quick else 100
    rows = []
    bench.events.unlink(missing_ok=True)
    with bench.upstream() as triton, bench.gateway(triton) as server:
        begin = time.monotonic() + 1.5
        # Let the background load run for twice the time that the disconnecting clients need.
        end = begin + 2.0 + 2 * len(KINDS) * count * (_AFTER_S + _APART_S) / _LANES
        shares = bench.clients.start(
            Load(
                port=server.port,
                path=server.path,
                body=chat(seed=_BEAT_MS),
                streams=_BACKGROUND,
                ramp_s=0.2,
                begin=begin,
                end=end,
            )
        )
        wait_until(begin)
        left = {
            kind.name: asyncio.run(
                _disconnect_clients(bench, server, kind, MARKED + n * count, count)
            )
            for n, kind in enumerate(KINDS)
        }
        seen = total(shares)
    arrived = _events(bench)
    if seen.errors:
        raise Unmeasured(f"cancel: {seen.errors[0]}")
    for kind in KINDS:
        row: dict[str, Any] = {"client left while": kind.name, "requests": count}
        for event in ("stop", "reset"):
            late = [
                arrived[key, event] - at
                for key, at in left[kind.name].items()
                if (key, event) in arrived
            ]
            row |= {
                f"{event} seen": len(late),
                f"{event} p50 ms": 1e3 * percentile(late, 50),
                f"{event} p99 ms": 1e3 * percentile(late, 99),
            }
        rows.append(row)
    return rows


def before_first_token(bench: Bench, server: Server, first: int, count: int) -> list[float]:
    """Return the seconds from each client's disconnect until the upstream gets a stop request.

    `count` clients disconnect before the first token. Requests that were not stopped are left out.
    The requests have the values `first`, `first` + 1 and so on of `max_tokens`, because the
    upstream's log identifies a request by this number. No other request may have the same number.
    """
    (kind,) = (kind for kind in KINDS if kind.seed == SILENT)
    left = asyncio.run(
        _disconnect_clients(bench, server, kind, first, count, {"stop"}, _PEER_PATIENCE_S)
    )
    arrived = _events(bench)
    return [arrived[key, "stop"] - at for key, at in left.items() if (key, "stop") in arrived]


async def _disconnect_clients(
    bench: Bench,
    server: Server,
    kind: _Kind,
    first: int,
    count: int,
    events: Set[str] = frozenset({"stop", "reset"}),
    patience_s: float = _PATIENCE_S,
) -> dict[int, float]:
    """Return the time at which each client disconnected, by the `max_tokens` of its request."""
    left = {}

    async def lane(n: int) -> None:
        await asyncio.sleep(n * _APART_S)
        for key in range(first + n, first + count, _LANES):
            body = orjson.loads(chat(seed=kind.seed, tokens=key)) | {"stream": kind.stream}
            reader, writer = await asyncio.open_connection(LOCALHOST, server.port)
            writer.write(request(server.port, server.path, server.body(orjson.dumps(body))))
            if kind.stream and kind.seed != SILENT:
                while LETTER not in (data := await reader.read(65536)):
                    if not data:
                        raise Unmeasured("the gateway closed a stream before its first token")
            await asyncio.sleep(_AFTER_S)
            # Wait until the scripted Triton has logged the request's arrival. On a busy machine,
            # this takes longer than `_AFTER_S`.
            await _wait_for_events(bench, {(key, "arrival")}, _PATIENCE_S)
            left[key] = time.monotonic()
            writer.transport.abort()
            await asyncio.sleep(_APART_S)

    await asyncio.gather(*[lane(n) for n in range(_LANES)])
    await _wait_for_events(bench, {(key, event) for key in left for event in events}, patience_s)
    return left


async def _wait_for_events(bench: Bench, wanted: set[tuple[int, str]], patience_s: float) -> None:
    """Wait until the scripted upstream has logged all `wanted` events.

    If events are still missing after `patience_s` seconds, return without an error. An element of
    `wanted` is the `max_tokens` of a request and the name of an event.
    """
    deadline = time.monotonic() + patience_s
    while not wanted <= _events(bench).keys():
        if time.monotonic() > deadline:
            return
        await asyncio.sleep(0.01)


def _events(bench: Bench) -> dict[tuple[int, str], float]:
    """Return the time of each logged event, by the request's `max_tokens` and the event's name.

    The scripted Triton does not end a logged request when it receives a stop request. A gateway may
    therefore send several stop requests. The returned time is that of the first.
    """
    whole, _, _ = bench.events.read_text().rpartition("\n")
    lines = map(json.loads, reversed(whole.splitlines()))
    return {(line["key"], line["event"]): line["at"] for line in lines}
