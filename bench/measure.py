"""Measurements of a server under load during a window of time, for the parts of the benchmark.

`window` runs a load of chats and measures the server's CPU time. `receive` measures a client that
receives the same tokens without a gateway.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice

import orjson
from tokenizers import Tokenizer

from bench.load import NUMBER, Load, Seen, total
from bench.machine import ROOT
from bench.servers import MODEL, Bench, Server, Unmeasured, on_cores
from ops.local_stack.ports import LOCALHOST

_CANARY_PERIOD_S = 0.005
_CANARY_TIMEOUT_S = 5.0
_LEAD_S = 2.5
"""Seconds between the start of a receiving process and the window.

The process starts within this time even on a busy machine.
"""
_STREAMS_PER_SECOND = 500
TOKENS_FOR_EVER = 500_000
_WORDS = "The capital of France is the city in which most people live and work today"


@dataclass(frozen=True)
class Window:
    """Results of a measurement window of `seconds` seconds.

    `cpu_s` is the CPU time of the process under test. `seen` has the measurements of the clients.
    `canary_s` has the response times of the liveness probe `canary`, in seconds.
    """

    seconds: float
    cpu_s: float
    seen: Seen
    canary_s: list[float]

    @property
    def us_per_token(self) -> float:
        return 1e6 * self.cpu_s / max(self.seen.tokens, 1)

    @property
    def us_per_request(self) -> float:
        return 1e6 * self.cpu_s / max(self.seen.finished, 1)

    @property
    def stall_ms(self) -> float:
        """Longest response time of the liveness probe in milliseconds; NaN without a probe."""
        return 1e3 * max(self.canary_s, default=math.nan)

    @property
    def core_percent(self) -> float:
        return 100 * self.cpu_s / self.seconds


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile of `values` by the nearest-rank method; NaN if there are no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)] if ordered else math.nan


def chat(
    *, seed: int, tokens: int = TOKENS_FOR_EVER, prompt_tokens: int = 8, model: str = "demo"
) -> bytes:
    """Return the body of a streamed chat with a unique prompt of about `prompt_tokens` tokens."""
    return orjson.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt(prompt_tokens)}],
            "max_tokens": tokens,
            "temperature": 0,
            "seed": seed,
            "stream": True,
        }
    )


def prompt(tokens: int) -> str:
    """Return a prompt of about `tokens` tokens: the placeholder `NUMBER`, then English words.

    The load client replaces the placeholder by a different number in each request.
    """
    per_word = _count(_WORDS) / len(_WORDS.split())
    words = round((tokens - _count(NUMBER.decode())) / per_word)
    return " ".join([NUMBER.decode(), *islice(cycle(_WORDS.split()), max(1, words))])


def _count(text: str) -> int:
    return len(encode(text.replace(NUMBER.decode(), "12345678")))


def encode(text: str) -> list[int]:
    """Return the token ids of a text in the demo model's tokenizer."""
    return list(_tokenizer().encode(text).ids)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def wait_until(moment: float) -> None:
    """Sleep until the monotonic clock shows `moment`.

    Return at once if the moment is in the past.
    """
    time.sleep(max(0.0, moment - time.monotonic()))


def window(
    bench: Bench,
    server: Server,
    body: bytes,
    streams: int,
    *,
    seconds: float | None = None,
    settle_s: float = 0.7,
    ramp_s: float | None = None,
    watched: bool = False,
    on_edge: Callable[[], object] = lambda: None,
) -> Window:
    """Load the server with `streams` closed loops, and measure for `seconds`.

    The streams start one after the other within `ramp_s` seconds, by default 500 per second. The
    liveness probe `canary` runs only if `watched` is True, because its requests add to the server's
    CPU time. `on_edge` is called at the start and at the end of the window. Raises Unmeasured if
    any stream failed: a server that refuses requests would seem to be fast.
    """
    seconds = seconds or bench.seconds
    if ramp_s is None:
        ramp_s = streams / _STREAMS_PER_SECOND
    begin = time.monotonic() + ramp_s + settle_s
    load = Load(
        port=server.port,
        path=server.path,
        body=server.body(body),
        key=server.key,
        streams=streams,
        ramp_s=ramp_s,
        begin=begin,
        end=begin + seconds,
    )
    # Connect the canary before the load starts. Later, its connection would wait behind those of
    # the load, and the wait would be counted as a stall.
    nobody: contextlib.AbstractContextManager[list[float]] = contextlib.nullcontext([])
    with canary(server, begin) if watched else nobody as latencies:
        shares = bench.clients.start(load)
        wait_until(begin)
        on_edge()
        before, started = server.cpu_s(), time.monotonic()
        wait_until(load.end)
        cpu_s, took = server.cpu_s() - before, time.monotonic() - started
        on_edge()
    seen = total(shares)
    if seen.errors:
        raise Unmeasured(f"{server.name}, {streams} streams: {seen.errors[0]}")
    return Window(seconds, cpu_s * seconds / max(took, 1e-3), seen, latencies)


@contextlib.contextmanager
def canary(server: Server, begin: float) -> Iterator[list[float]]:
    """Probe the server's liveness endpoint in a thread, with a pause of 5 ms between requests.

    Yield a list of the response times in seconds, which grows during the context. The longest
    response time shows how long the server's event loop was stalled. The thread connects
    immediately, and sends requests from the monotonic time `begin` on. It requests the highest
    scheduling priority, because its own delays would lengthen the response times.
    """
    latencies: list[float] = []
    over = threading.Event()

    def ask() -> None:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), -20)
        connection = http.client.HTTPConnection(LOCALHOST, server.port, timeout=_CANARY_TIMEOUT_S)
        with contextlib.closing(connection):
            connection.connect()
            over.wait(max(0.0, begin - time.monotonic()))
            while not over.wait(_CANARY_PERIOD_S):
                started = time.monotonic()
                try:
                    connection.request("GET", server.live)
                    connection.getresponse().read()
                except (OSError, http.client.HTTPException):
                    over.set()  # stop: the server is saturated, and the time so far shows it
                latencies.append(time.monotonic() - started)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield latencies
    finally:
        over.set()
        thread.join()


def receive(bench: Bench, kind: str, triton: str, streams: int, seed: int) -> Window:
    """Measure a client that receives the same streams directly from Triton, without a gateway.

    The client `kind` is tritonclient or direct (see `bench.receivers`).
    """
    command = [sys.executable, "-m", "bench.receivers", kind, "--triton", triton]
    command += ["--streams", str(streams), "--seed", str(seed)]
    pipe = subprocess.PIPE
    with on_cores(bench.cores.gateway):
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
    assert process.stdin
    assert process.stdout
    try:
        watched = Server(kind, process.pid, 0)
        process.stdout.readline()
        begin = time.monotonic() + _LEAD_S + streams / _STREAMS_PER_SECOND
        end = begin + bench.seconds
        process.stdin.write(f"{begin} {end}\n")
        process.stdin.flush()
        wait_until(begin)
        before = watched.cpu_s()
        wait_until(end)
        cpu_s = watched.cpu_s() - before
        output, _ = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    # Parse only the last line of the output: the grpc library may have printed messages before it.
    last = (output.splitlines() or [""])[-1]
    found = json.loads(last) if last.startswith("{") else {}
    if not found.get("messages"):
        raise Unmeasured(f"{kind} received nothing; exit code {process.returncode}")
    seen = Seen(tokens=found["messages"])
    seen.gaps.extend(found["gaps"])
    return Window(bench.seconds, cpu_s, seen, [])
