"""Measurement in a window of time: a load from outside, and the CPU of the process under test."""

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
"""Seconds between the start of a client process and the window. A busy machine starts it late."""
_STREAMS_PER_SECOND = 500
TOKENS_FOR_EVER = 500_000
_WORDS = "The capital of France is the city in which most people live and work today"


@dataclass(frozen=True)
class Window:
    """Results of a window. `cpu_s` is of the process under test; `seen` is what the clients saw."""

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
        """The longest response time of the canary in milliseconds; NaN without a canary."""
        return 1e3 * max(self.canary_s, default=math.nan)

    @property
    def core_percent(self) -> float:
        return 100 * self.cpu_s / self.seconds


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` of all values do not exceed; NaN if empty."""
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
    """Return English words after a number, which the load client replaces in each request."""
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

    Streams start one after the other within `ramp_s` seconds, by default as quickly as possible.
    The canary runs only if `watched` is True: its 200 requests a second use CPU time that would be
    attributed to tokens. `on_edge` is called at the start and at the end of the window. Raises
    Unmeasured if any stream failed, because the figures of a server that refuses are meaningless.
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
    # Connect the canary before the load starts: later, its connection would wait for others.
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
    """Request the server's liveness every 5 ms from `begin` on. Yield the durations in seconds.

    The canary connects immediately. The longest duration is the stall of the server's event loop,
    plus the delay of the canary's thread, which requests the highest priority available.
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
    """Measure the same load with a client that only receives, without a gateway."""
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
    # Parse only the last line: the grpc library may have printed messages before.
    last = (output.splitlines() or [""])[-1]
    found = json.loads(last) if last.startswith("{") else {}
    if not found.get("messages"):
        raise Unmeasured(f"{kind} received nothing; exit code {process.returncode}")
    seen = Seen(tokens=found["messages"])
    seen.gaps.extend(found["gaps"])
    return Window(bench.seconds, cpu_s, seen, [])
