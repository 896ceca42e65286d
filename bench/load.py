"""Load generator with raw sockets, which sends streaming requests in closed loops.

A client library needs more CPU time for an SSE event than the gateway. The benchmark would then
measure the library instead of the gateway. This client therefore does not parse events: it only
counts tokens and reads the clock. The scripted Triton always sends the token `~` (see
`upstream.TOKEN`), so the number of these characters is the number of tokens.

A stream is one keep-alive connection that sends one request at a time. It sends the next request
when the response to the previous request is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from typing import TypeVar, cast

import uvloop

from bench.machine import pin

LETTER = b"~"
NUMBER = b"@@@@@@@@"
"""Placeholder in a request body, which is replaced by a different number in each request.

Each prompt is then different, so no server can answer from a cache of earlier prompts.
"""

_END_OF_CHUNKS = b"\r\n0\r\n\r\n"
_END_OF_HEADERS = b"\r\n\r\n"
_CONNECT_TIMEOUT_S = 30.0
_RETRY_S = 1.0

L, R = TypeVar("L"), TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Load of one or more client processes, with `streams` closed loops in total.

    The streams start one after the other within `ramp_s` seconds. A stream sends its next request
    `pause_s` seconds after an answer. Only events between `begin` and `end` are counted. At `end`,
    all connections are closed, even in the middle of an answer. `begin` and `end` are times of the
    monotonic clock, which all processes share.
    """

    port: int
    path: str
    body: bytes
    key: str = "unused"
    streams: int
    ramp_s: float
    begin: float
    end: float
    pause_s: float = 0.0
    is_patient: bool = False
    """True if a request that gets status 503 before `begin` is repeated instead of failing.

    While all streams start at about the same time, a server may refuse some of their requests.
    """


@dataclass
class Seen:
    """Measurements of the clients between `Load.begin` and `Load.end`. Times are in seconds.

    Attributes:
        tokens: number of received tokens.
        finished: number of complete answers.
        live: number of streams that were in the middle of an answer at `Load.begin`.
        busy: CPU time of the busiest client process, as a fraction of one core.
        first: times from sending a request to the first token of the answer.
        gaps: times between two reads from one stream's socket that return at least one token.
        errors: error messages of failed streams, also from before `begin`.
    """

    tokens: int = 0
    finished: int = 0
    live: int = 0
    busy: float = 0.0
    first: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))
    errors: list[str] = field(default_factory=list)


def request(port: int, path: str, body: bytes, key: str = "unused") -> bytes:
    """Return the bytes of an HTTP/1.1 POST request with a JSON body and an API key."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {key}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


class _Stream(asyncio.Protocol):
    """Connection that repeats the load's request whenever the previous response is complete."""

    def __init__(self, load: Load, seen: Seen, numbers: Iterator[int]) -> None:
        self._load = load
        self._numbers = numbers
        self._seen = seen
        self._before, self._number, self._after = request(
            load.port, load.path, load.body, load.key
        ).partition(NUMBER)
        self._head = b""
        self._in_head = True
        self._tail = b""
        self._left: int | None = None
        self._sent = 0.0
        self._last = 0.0
        self._over = False
        self._is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._over:
            self._seen.errors.append(f"connection lost: {exc}")

    def close(self) -> None:
        self._over = True
        self._transport.abort()

    def _ask(self) -> None:
        if self._over:
            return
        self._in_head, self._head, self._tail, self._last = True, b"", b"", 0.0
        self._sent = time.monotonic()
        number = b"%08d" % (next(self._numbers) % 10**8) if self._number else b""
        self._transport.write(self._before + number + self._after)

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        if self._in_head:
            self._head += data
            head, separator, data = self._head.partition(_END_OF_HEADERS)
            if not separator:
                return
            self._in_head = False
            self._read_head(head)
            if self._over:
                return
        if count := data.count(LETTER):
            self._tokens(count)
        if self._left is None:
            # Keep the last seven bytes of a chunked response, because the marker of its end may
            # arrive in several reads.
            self._tail = (self._tail + data)[-7:] if len(data) < 7 else data[-7:]
            done = self._tail == _END_OF_CHUNKS
        else:
            self._left -= len(data)
            done = self._left <= 0
        if done and self._is_refused:
            self._is_refused = False
            asyncio.get_running_loop().call_later(_RETRY_S, self._ask)
        elif done:
            if self._load.begin <= time.monotonic() < self._load.end:
                self._seen.finished += 1
            if self._load.pause_s:
                asyncio.get_running_loop().call_later(self._load.pause_s, self._ask)
            else:
                self._ask()

    def _read_head(self, head: bytes) -> None:
        self._left = None
        if self._load.is_patient and head.startswith(b"HTTP/1.1 503"):
            self._is_refused = time.monotonic() < self._load.begin
        if not (head.startswith(b"HTTP/1.1 200") or self._is_refused):
            self._seen.errors.append(self._head[:500].decode(errors="replace"))
            self.close()
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                self._left = int(line[15:])

    def _tokens(self, count: int) -> None:
        now = time.monotonic()
        load, seen = self._load, self._seen
        if load.begin <= now < load.end:
            seen.tokens += count
            if self._last:
                seen.gaps.append(now - self._last)
                seen.live += self._last < load.begin
            else:
                seen.first.append(now - self._sent)
        self._last = now


async def _run(load: Load) -> Seen:
    loop = asyncio.get_running_loop()
    seen = Seen()
    numbers = itertools.count(random.randrange(10**8))
    streams: list[_Stream] = []
    started = time.monotonic()
    for n in range(load.streams):
        await asyncio.sleep(started + n * load.ramp_s / load.streams - time.monotonic())
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, stream = await loop.create_connection(
                lambda: _Stream(load, seen, numbers), "127.0.0.1", load.port
            )
        streams.append(stream)
    await asyncio.sleep(max(0.0, load.begin - time.monotonic()))
    before, began = time.process_time(), time.monotonic()
    await asyncio.sleep(max(0.0, load.end - time.monotonic()))
    seen.busy = (time.process_time() - before) / max(time.monotonic() - began, 1e-3)
    for stream in streams:
        stream.close()
    return seen


def run(load: Load) -> Seen:
    """Run the load in this process until `load.end`, and return the measurements.

    Raises OSError if a connection to the server cannot be opened.
    """
    return uvloop.run(_run(load))


class Clients:
    """Pool of processes that run loads. The processes are pinned to `cores`."""

    def __init__(self, cores: Iterable[int]) -> None:
        cores = tuple(cores)
        self.count = len(cores)
        # Start one process more than `start` uses, so that a second load can run at the same time.
        self._pool = ProcessPoolExecutor(
            self.count + 1, mp_context=get_context("spawn"), initializer=pin, initargs=(cores,)
        )
        for started in [self._pool.submit(time.sleep, 0.2) for _ in range(self.count + 1)]:
            started.result()

    def start(self, load: Load) -> list[Future[Seen]]:
        """Divide the load's streams among the processes, and start the load.

        A small load uses fewer processes: one for each 32 streams. Return a future for each
        process, whose result is the process's measurements.
        """
        count = min(self.count, -(-load.streams // 32))
        shares = [load.streams // count + (n < load.streams % count) for n in range(count)]
        return [self._pool.submit(run, replace(load, streams=share)) for share in shares]

    def submit(self, work: Callable[[L], R], load: L) -> Future[R]:
        """Call `work(load)` in one process of the pool. Return a future for the result."""
        return self._pool.submit(work, load)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._pool.shutdown(cancel_futures=True)


def total(futures: list[Future[Seen]]) -> Seen:
    """Wait for all processes of a load, and return the sum of their measurements.

    `busy` is the maximum instead of the sum.
    """
    whole = Seen()
    for future in futures:
        share = future.result()
        whole.tokens += share.tokens
        whole.finished += share.finished
        whole.live += share.live
        whole.busy = max(whole.busy, share.busy)
        whole.first.extend(share.first)
        whole.gaps.extend(share.gaps)
        whole.errors.extend(share.errors)
    return whole
