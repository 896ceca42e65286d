"""Cost of prompts of 8,000 to 128,000 tokens, and their effect on other streams.

Three cases are measured. In the first, requests for one token are sent one after the other. In the
second, the same requests are sent while 100 streams receive a token every 20 ms. In the third,
several streams stay open after their first token, to measure the memory that each of them retains.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.load import LETTER, NUMBER, Load, Seen, request, total
from bench.measure import Window, chat, percentile, window
from bench.pace import BURST, IDLE
from bench.servers import Bench, Server, Unmeasured
from ops.local_stack.ports import LOCALHOST

SIZES = (8_000, 32_000, 128_000)
_STREAMS, _BEAT_MS = 100, 20
_OPEN, _QUICK_OPEN = 16, 8
# Prompt tokens per second that even a busy machine processes. The length of a measurement window is
# computed from this speed, so that several prompts fit in each window.
_PER_SECOND = 16_000
_BEGUN_WITHIN_S, _SETTLE_S = 60.0, 2.0
_PEAK = "VmHWM"


def long_prompts(bench: Bench) -> list[dict[str, Any]]:
    """Return a row for each prompt size: latency, CPU time and memory of the gateway.

    Memory is the resident memory of the gateway's process.
    """
    rows = []
    with bench.upstream() as triton:
        for size in SIZES:
            # Start a new gateway for each size. Otherwise, a prompt would reuse memory that earlier
            # prompts have freed, and the measured increase would be too small.
            with bench.gateway(triton) as server:
                rows.append(_row(bench, server, size))
    return rows


def _row(bench: Bench, server: Server, size: int) -> dict[str, Any]:
    bench = replace(bench, seconds=max(bench.seconds, size / _PER_SECOND))
    body = chat(seed=BURST, tokens=1, prompt_tokens=size)
    window(bench, server, body, 1, seconds=1.0)  # warm up: load what later requests need
    before = server.rss()
    _forget_peak(server)
    alone = window(bench, server, body, 1)
    peak = _peak(server) - before
    if not alone.seen.finished:
        raise Unmeasured(f"no answer to a prompt of {size} tokens within a window")
    calm, disturbed, prompts = _beside(bench, server, body)
    gaps = [1e3 * percentile(each.seen.gaps, 99) for each in (calm, disturbed)]
    return {
        "prompt tokens": size,
        "first token p50 ms": 1e3 * percentile(alone.seen.first, 50),
        "CPU ms/request": alone.us_per_request / 1e3,
        "peak MiB more": peak / 2**20,
        "KiB kept while answered": _retained_bytes(bench, server, size) / 1024,
        "others' gap p99 ms": gaps[1],
        "without": gaps[0],
        "added": gaps[1] - gaps[0],
        "longest stall ms": disturbed.stall_ms,
        "prompts meanwhile": prompts,
    }


def _beside(bench: Bench, server: Server, body: bytes) -> tuple[Window, Window, int]:
    """Measure 100 streams first without, then with concurrent long prompts.

    Return both windows, and the number of long prompts that were answered.
    """
    trickle = chat(seed=_BEAT_MS)
    calm = window(bench, server, trickle, _STREAMS, watched=True)
    with _background_load(bench, server, body, 1, 2 * bench.seconds + 2.0) as shares:
        disturbed = window(bench, server, trickle, _STREAMS, watched=True)
    return calm, disturbed, total(shares).finished


def _retained_bytes(bench: Bench, server: Server, size: int) -> float:
    """Return the bytes that the gateway retains per open stream after its first token."""
    streams = _QUICK_OPEN if bench.quick else _OPEN
    body = server.body(chat(seed=IDLE, prompt_tokens=size))
    with contextlib.ExitStack() as lines:
        # Open one stream before the measurement. The process then already has the memory that it
        # temporarily needs to read a long prompt.
        lines.enter_context(_open_stream(server, body, 0))
        before = _wait_for_settled_rss(server)
        for number in range(1, streams + 1):
            lines.enter_context(_open_stream(server, body, number))
        return (_wait_for_settled_rss(server) - before) / streams


def _wait_for_settled_rss(server: Server) -> int:
    """Wait until the gateway has freed the prompt's text, and return the resident bytes."""
    time.sleep(_SETTLE_S)
    return server.rss()


def _open_stream(server: Server, body: bytes, number: int) -> socket.socket:
    """Send a request, wait for its first token, and return the open connection."""
    line = socket.create_connection((LOCALHOST, server.port), timeout=_BEGUN_WITHIN_S)
    line.sendall(request(server.port, server.path, body.replace(NUMBER, b"%08d" % number)))
    while LETTER not in (data := line.recv(2**16)):
        if not data:
            raise Unmeasured("a long prompt was not answered")
    return line


@contextlib.contextmanager
def _background_load(
    bench: Bench, server: Server, body: bytes, streams: int, seconds: float
) -> Iterator[list[Future[Seen]]]:
    """Run `streams` closed loops in background processes for `seconds`.

    Yield one future per process, with the measurements of the process.
    """
    now = time.monotonic()
    load = Load(
        port=server.port,
        path=server.path,
        body=server.body(body),
        streams=streams,
        ramp_s=0.0,
        begin=now,
        end=now + seconds,
    )
    yield bench.clients.start(load)


def _peak(server: Server) -> int:
    """Return the peak of the resident bytes since the call of `_forget_peak`."""
    for line in Path(f"/proc/{server.pid}/status").read_text().splitlines():
        if line.startswith(_PEAK):
            return 1024 * int(line.split()[1])
    raise Unmeasured(f"this kernel tells no {_PEAK}")


def _forget_peak(server: Server) -> None:
    # Write 5, which resets the peak to the current resident size (proc(5)).
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")
