"""Measurement of a server's resident memory: after its start, after a load, and per idle stream."""

from __future__ import annotations

import time
from dataclasses import dataclass

from bench.load import Load, total
from bench.measure import chat, wait_until, window
from bench.pace import BURST, IDLE
from bench.servers import Bench, Server, Unmeasured

_PER_SECOND = 400


@dataclass(frozen=True)
class Resident:
    """Resident memory of a server in bytes.

    `started` is measured after the start and `used` after a short load. `per_stream` is the
    increase for each of `streams` open streams without new tokens.
    """

    started: int
    used: int
    streams: int
    per_stream: float


def resident(bench: Bench, server: Server) -> Resident:
    """Measure the memory of a server that has just started and has not received requests.

    Raises Unmeasured if a stream fails.
    """
    streams = 200 if bench.quick else 2000
    started = server.rss()
    window(bench, server, chat(seed=BURST, tokens=16), 16, seconds=1.0)
    used = server.rss()
    ramp_s = streams / _PER_SECOND
    begin = time.monotonic() + ramp_s + 3.0
    load = Load(
        port=server.port,
        path=server.path,
        body=server.body(chat(seed=IDLE)),
        streams=streams,
        ramp_s=ramp_s,
        begin=0.0,
        end=begin + 0.5,
    )
    shares = bench.clients.start(load)
    wait_until(begin)
    idle = server.rss()
    seen = total(shares)
    if seen.errors or seen.tokens < streams / 2:
        said = f"{seen.tokens} of {streams} streams began; {seen.errors[:1]}"
        raise Unmeasured(f"{server.name}: {said}")
    return Resident(started, used, seen.tokens, (idle - used) / seen.tokens)
