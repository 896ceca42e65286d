"""Load generator for an open loop: requests are sent at random times, without waiting for answers.

A request uses the idle connection that was used last. If no connection is idle, the client opens a
new one. The connection pools of client libraries do the same. As in `bench.load`, the client only
counts tokens and reads the clock, so that its own CPU time does not affect the results.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from array import array
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import cast

import uvloop

from bench.load import LETTER, Clients, request

USEFUL_WITHIN_S = 1.0
"""Maximum time to the first token, in seconds, of an answer whose tokens count as useful.

If the first token arrives later, a real client would already have given up.
"""

_END_OF_CHUNKS = b"\r\n0\r\n\r\n"
_END_OF_HEADERS = b"\r\n\r\n"
_REFUSED = (429, 503)
TAIL_S = 1.5
"""Seconds for which the client waits after the window for answers that are not complete yet."""


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Requests of one tenant: an average of `per_s` requests per second, at random times.

    `name` is also the tenant's API key. If `before` is True, the requests are sent only before the
    window starts.
    """

    name: str
    body: bytes
    per_s: float
    before: bool = False


@dataclass(frozen=True, kw_only=True)
class OpenLoad:
    """Load that one or more client processes generate.

    Requests are sent from the start of the load until `end`. The window is the time from `begin` to
    `end`. Only requests that are sent in the window are counted. For a tenant whose `before` is
    True, all requests are counted, although they are sent before the window. Answers may arrive
    until `tail_s` seconds after `end`. `begin` and `end` are times of the monotonic clock, which
    all processes share.
    """

    port: int
    path: str
    tenants: tuple[Tenant, ...]
    begin: float
    end: float
    tail_s: float = TAIL_S


@dataclass
class Outcome:
    """Measurements of one tenant's counted requests. Times are in seconds.

    Attributes:
        asked: number of requests.
        finished: number of complete answers with status 200.
        unfinished: number of requests without a complete answer: the connection failed, or the
            answer had not ended `OpenLoad.tail_s` seconds after the window.
        tokens: number of tokens that arrived in the window, also for requests that are not counted.
        useful: the part of `tokens` in answers whose first token arrived in time, which means
            within `USEFUL_WITHIN_S`.
        first: times from sending a request to the first token.
        refused: times from sending a request to a status of 429 or 503.
        errors: messages of the first failures.
    """

    asked: int = 0
    finished: int = 0
    unfinished: int = 0
    tokens: int = 0
    useful: int = 0
    first: array[float] = field(default_factory=lambda: array("d"))
    refused: array[float] = field(default_factory=lambda: array("d"))
    errors: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.asked += other.asked
        self.finished += other.finished
        self.unfinished += other.unfinished
        self.tokens += other.tokens
        self.useful += other.useful
        self.first.extend(other.first)
        self.refused.extend(other.refused)
        self.errors.extend(other.errors)


Outcomes = dict[str, Outcome]
"""Outcomes by tenant name."""


class _Request:
    __slots__ = ("counted", "first", "outcome", "sent", "status")

    def __init__(self, outcome: Outcome, sent: float, *, counted: bool) -> None:
        self.outcome = outcome
        self.sent = sent
        self.counted = counted
        self.status = 0
        self.first = 0.0


class _Connection(asyncio.Protocol):
    """Keep-alive connection to the server, for one request at a time.

    After a response, the connection returns to its process's pool.
    """

    def __init__(self, load: OpenLoad, pool: list[_Connection]) -> None:
        self._load = load
        self._pool = pool
        self._asked: _Request | None = None
        self._to_send = b""
        self._head = b""
        self._in_head = True
        self._tail = b""
        self._left: int | None = None
        self._closes = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._to_send)

    def connection_lost(self, exc: Exception | None) -> None:
        asked, self._asked = self._asked, None
        with contextlib.suppress(ValueError):
            self._pool.remove(self)
        if asked is not None and asked.counted:
            asked.outcome.unfinished += 1
            if len(asked.outcome.errors) < 3:
                asked.outcome.errors.append(f"connection lost: {exc}")

    def ask(self, asked: _Request, data: bytes) -> None:
        self._asked = asked
        self._in_head, self._head, self._tail = True, b"", b""
        if self._transport is None:
            self._to_send = data
        else:
            self._transport.write(data)

    def give_up(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None and asked.counted:
            asked.outcome.unfinished += 1
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        asked = self._asked
        if asked is None:
            return
        if self._in_head:
            self._head += data
            head, separator, data = self._head.partition(_END_OF_HEADERS)
            if not separator:
                return
            self._in_head = False
            self._read_head(asked, head)
        if count := data.count(LETTER):
            self._tokens(asked, count)
        if self._left is None:
            self._tail = (self._tail + data)[-7:] if len(data) < 7 else data[-7:]
            done = self._tail == _END_OF_CHUNKS
        else:
            self._left -= len(data)
            done = self._left <= 0
        if done:
            self._end(asked)

    def _read_head(self, asked: _Request, head: bytes) -> None:
        self._left = None
        asked.status = int(head[9:12])
        lines = head.lower().split(b"\r\n")
        self._closes = b"connection: close" in lines
        for line in lines:
            if line.startswith(b"content-length:"):
                self._left = int(line[15:])
        if asked.status in _REFUSED:
            if asked.counted:
                asked.outcome.refused.append(time.monotonic() - asked.sent)
        elif asked.status != 200 and len(asked.outcome.errors) < 3:
            asked.outcome.errors.append(self._head[:300].decode(errors="replace"))

    def _tokens(self, asked: _Request, count: int) -> None:
        now = time.monotonic()
        outcome = asked.outcome
        if not asked.first:
            asked.first = now
            if asked.counted:
                outcome.first.append(now - asked.sent)
        if self._load.begin <= now < self._load.end:
            outcome.tokens += count
            if asked.first - asked.sent <= USEFUL_WITHIN_S:
                outcome.useful += count

    def _end(self, asked: _Request) -> None:
        self._asked = None
        if asked.counted and asked.status == 200:
            asked.outcome.finished += 1
        if self._closes and self._transport is not None:
            self._transport.abort()
        else:
            self._pool.append(self)


class _Client:
    """Client of one process, which sends the requests of a load with a pool of connections."""

    def __init__(self, load: OpenLoad) -> None:
        self._load = load
        self._pool: list[_Connection] = []
        self._all: set[_Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self.outcomes: Outcomes = {tenant.name: Outcome() for tenant in load.tenants}

    async def run(self) -> Outcomes:
        load = self._load
        async with asyncio.TaskGroup() as tasks:
            for tenant in load.tenants:
                tasks.create_task(self._arrivals(tenant))
        await asyncio.sleep(load.tail_s)
        for connection in self._all:
            connection.give_up()
        return self.outcomes

    async def _arrivals(self, tenant: Tenant) -> None:
        load, chance = self._load, random.Random()
        outcome = self.outcomes[tenant.name]
        data = request(load.port, load.path, tenant.body, tenant.name)
        end = load.begin if tenant.before else load.end
        moment = time.monotonic()
        while (moment := moment + chance.expovariate(tenant.per_s)) < end:
            if (wait_s := moment - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            sent = time.monotonic()
            counted = load.begin <= sent or tenant.before
            outcome.asked += counted
            self._send(_Request(outcome, sent, counted=counted), data)

    def _send(self, asked: _Request, data: bytes) -> None:
        if self._pool:
            self._pool.pop().ask(asked, data)
            return
        connection = _Connection(self._load, self._pool)
        connection.ask(asked, data)
        self._all.add(connection)
        task = asyncio.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _open(self, connection: _Connection) -> None:
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: connection, "127.0.0.1", self._load.port
            )
        except OSError as error:
            connection.connection_lost(error)


async def _run(load: OpenLoad) -> tuple[Outcomes, float]:
    before, began = time.process_time(), time.monotonic()
    outcomes = await _Client(load).run()
    busy = (time.process_time() - before) / max(time.monotonic() - began, 1e-3)
    return outcomes, busy


def run(load: OpenLoad) -> tuple[Outcomes, float]:
    """Run a load in this process.

    Return the outcomes by tenant, and the CPU time of this process as a fraction of one core.
    """
    return uvloop.run(_run(load))


def start(clients: Clients, load: OpenLoad) -> list[Future[tuple[Outcomes, float]]]:
    """Divide a load evenly among all client processes, and start it.

    Return a future for each process, with the result of `run`.
    """
    count = clients.count
    share = replace(
        load,
        tenants=tuple(replace(each, per_s=each.per_s / count) for each in load.tenants),
    )
    return [clients.submit(run, share) for _ in range(count)]


def total(futures: Iterable[Future[tuple[Outcomes, float]]]) -> tuple[Outcomes, float]:
    """Wait for all processes of a load. Return the sum of their outcomes by tenant.

    Also return the CPU time of the busiest process, as a fraction of one core.
    """
    whole: Outcomes = {}
    busiest = 0.0
    for future in futures:
        outcomes, busy = future.result()
        busiest = max(busiest, busy)
        for name, outcome in outcomes.items():
            whole.setdefault(name, Outcome()).add(outcome)
    return whole, busiest
