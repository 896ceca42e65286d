"""Limits counted in Redis, together with all workers and gateways: a round trip for what is asked.

A thread of its own talks to Redis, one pipeline at a time with all that came in meanwhile: many
requests share a round trip, and a busy event loop is never taken for a slow Redis. A tenant has one
key, ``limits:{<tenant>}``, so all of it is at one server of a cluster; `script.lua` says what is in
it. While a cluster lacks a part, no tenant is counted there.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

from redis.exceptions import AskError, NoScriptError, ResponseError

from gateway.tenancy.limits.request import NEVER, Decision, LimitName, LimitRequest, Settlement
from lora_store import redis_url
from lora_store.connect import FAILURES, close, connect, server_of
from lora_store.refusals import Refusals

log = logging.getLogger(__name__)

# Redis answers in well under a millisecond, but stands still while it forks for a snapshot.
TIMEOUT_S = 0.25
_CONNECT_TIMEOUT_S = 1.0
_RETRY_S = 1.0
_BATCH = 64
_RUNNING_LEASE_S = 15.0
_RENEW_S = 5.0
_FLUSH_S = 2.0
_NAMES: tuple[LimitName | None, ...] = (
    None,
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
)

# Of the errors without a class of their own, those that say nothing of the key.
_OF_THE_SERVER = ("BUSY ", "MISCONF ", "NOREPLICAS ")

_MAX_NUMBER = 2**53

_Answer = asyncio.Future["Decision | None"]


class _Pending(NamedTuple):
    request: LimitRequest
    answer: _Answer


class SharedLimits:
    """Use as an async context manager on the event loop that asks."""

    def __init__(
        self,
        url: str,
        on_up: Callable[[bool], None] = lambda up: None,
        *,
        timeout_s: float = TIMEOUT_S,
        on_refused: Callable[[], object] = lambda: None,
    ) -> None:
        """`url` in a form of `lora_store.redis_url`; raises ValueError for another.

        `on_up` is told, from a thread, whether Redis answers. `timeout_s` bounds each read.
        `on_refused` is called, from a thread, for each tenant whose key holds what does not fit.
        """
        self._url = redis_url.parse(url)
        self._timeout_s = timeout_s
        # What a request waits behind: others' batches, a cluster's redirections, a proxy that
        # passes bytes on one by one.
        self._patience_s = 2 * timeout_s
        self._connect_timeout_s = max(_CONNECT_TIMEOUT_S, timeout_s)
        self._client: Any = None
        self._script = files(__package__).joinpath("script.lua").read_text(encoding="utf-8")
        self._on_up = on_up
        self._refusals = Refusals(on_refused)
        self._gateway = uuid.uuid4().hex[:16]
        self._inbox: queue.SimpleQueue[_Pending | Settlement | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._up = False
        self._closing = threading.Event()
        self._running: Counter[str] = Counter()
        """By tenant, the places that this gateway has in Redis; the thread's own."""
        self._renewed = 0.0
        self._sha = ""

    async def __aenter__(self) -> SharedLimits:
        self._loop = asyncio.get_running_loop()
        started = asyncio.Event()
        done = partial(self._loop.call_soon_threadsafe, started.set)
        # No thread pool: this thread must not delay the interpreter's end.
        self._thread = threading.Thread(target=self._work, args=(done,), name="limits", daemon=True)
        self._thread.start()
        # The first request should find Redis; but a name that does not resolve takes seconds.
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await started.wait()
        except TimeoutError:
            log.warning("Redis does not answer; limits are not shared yet")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Sends what is settled and not told yet, within two seconds."""
        self._closing.set()
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, _FLUSH_S)

    @property
    def up(self) -> bool:
        return self._up

    async def take(self, request: LimitRequest) -> Decision | None:
        """Counts the request if no limit is in its way; None when Redis does not in time."""
        answer: _Answer = self._loop.create_future()
        with self._lock:
            if not self._up:
                return None
            self._inbox.put(_Pending(request, answer))
        try:
            # Unlike a timeout around it, this sees an answer that came while the loop was busy.
            await asyncio.wait([answer], timeout=self._patience_s)
        except asyncio.CancelledError:
            if not answer.cancel():  # it came in the same moment
                self._give_back(request, answer.result())
            raise
        return None if answer.cancel() else answer.result()

    def settle(self, settlement: Settlement) -> None:
        """Returns at once. A settlement that Redis fails on is not told twice: the reservation then
        counts for its minute, and the next renewal puts the places right."""
        self._inbox.put(settlement)

    # In the thread:

    def _work(self, started: Callable[[], object]) -> None:
        if not self._connect():
            log.warning("Redis is away; limits are counted as when_redis_is_away says")
        started()
        ended = False
        while not ended:
            if self._up:
                ended = self._turn()
            elif self._closing.wait(_RETRY_S):
                break
            elif self._connect():
                log.info("Redis answers; limits are shared again")
        self._disconnect()

    def _turn(self) -> bool:
        """One round trip; whether it was the last."""
        batch, ended = self._next_batch()
        try:
            self._send(batch)
            batch = []
            self._renew()
        except FAILURES as error:
            log.warning("limits are not shared now: Redis fails: %s", type(error).__name__)
            self._lose(batch)
        except Exception:  # this thread is what everybody waits for
            log.exception("limits are not shared now")
            self._lose(batch)
        return ended

    def _connect(self) -> bool:
        """With a new client: by then the URL may stand for other servers."""
        self._disconnect()
        try:
            self._client = connect(
                self._url, timeout_s=self._timeout_s, connect_timeout_s=self._connect_timeout_s
            )
            self._sha = self._client.script_load(self._script)
        except FAILURES:
            return False
        # Redis may have lost what runs here, or hold what has ended: `_renew` tells it at once.
        self._renewed = 0.0
        with self._lock:
            self._up = True
        self._on_up(True)
        return True

    def _disconnect(self) -> None:
        if self._client is not None:
            close(self._client)
            self._client = None

    def _next_batch(self) -> tuple[list[_Pending | Settlement], bool]:
        """All that waits, up to a limit, and whether it is the last."""
        batch: list[_Pending | Settlement] = []
        try:
            item = self._inbox.get(timeout=_RENEW_S)
            while item is not None:
                batch.append(item)
                if len(batch) == _BATCH:
                    return batch, False
                item = self._inbox.get_nowait()
        except queue.Empty:
            return batch, False
        return batch, True

    def _send(self, batch: list[_Pending | Settlement]) -> None:
        if not batch:
            return
        results = self._call([self._arguments(item) for item in batch])
        decided: list[tuple[_Answer, Decision | None, LimitRequest]] = []
        for item, result in zip(batch, results, strict=True):
            if isinstance(item, _Pending):
                decision = None
                if not isinstance(result, ResponseError):
                    decision = self._decision(item.request.tenant, result)
                    let_in = decision is not None and decision.refused is None
                    if let_in and item.request.concurrent is not None:
                        self._running[item.request.tenant] += item.request.places
                decided.append((item.answer, decision, item.request))
            else:
                self._running[item.tenant] -= item.places
        if decided:
            self._tell(decided)

    def _decision(self, tenant: str, result: object) -> Decision | None:
        """What the script says; None, as if Redis had not counted it, where that makes no sense."""
        if (
            not isinstance(result, list)
            or len(result) != len(Decision._fields) + 1
            or not all(type(n) is int and NEVER <= n <= _MAX_NUMBER for n in result)
            or not 0 <= result[0] < len(_NAMES)
        ):
            self._refusals.add(_key(tenant), "the script answers nonsense")
            return None
        refused, *numbers, unfit = result
        if unfit:
            self._refusals.add(_key(tenant), f"{unfit} fields of no known form")
        return Decision(_NAMES[refused], *numbers)

    def _arguments(self, item: _Pending | Settlement) -> tuple[str, tuple[object, ...]]:
        """The tenant and the script's arguments."""
        if isinstance(item, Settlement):
            tenant, *rest = item
            return tenant, ("settle", *rest)
        request = item.request
        limits = [
            -1 if n is None else n for n in (request.requests, request.tokens, request.concurrent)
        ]
        return request.tenant, ("take", *limits, request.wanted, request.places)

    def _call(self, calls: Sequence[tuple[str, tuple[object, ...]]]) -> list[Any]:
        """The script's answers, in one round trip; in place of one, what is wrong with its key.

        Raises the first error that is not a key's.
        """
        results = self._pipelined(calls)
        if any(isinstance(result, NoScriptError) for result in results):
            # Somebody emptied Redis' cache of scripts; nothing of such a call was done.
            self._sha = self._client.script_load(self._script)
            again = [i for i, result in enumerate(results) if isinstance(result, NoScriptError)]
            for i, result in zip(again, self._pipelined([calls[i] for i in again]), strict=True):
                results[i] = result
        for (tenant, _), result in zip(calls, results, strict=True):
            if isinstance(result, Exception):
                if type(result) is not ResponseError or str(result).startswith(_OF_THE_SERVER):
                    raise result
                self._refusals.add(_key(tenant), result)
        return results

    def _pipelined(self, calls: Sequence[tuple[str, tuple[object, ...]]]) -> list[Any]:
        """By server, where there are several; a cluster client's own pipeline asks twice."""
        running_lease_ms = int(_RUNNING_LEASE_S * 1000)
        commands: list[tuple[object, ...]] = []
        at_server: dict[Any, list[int]] = {}
        for i, (tenant, (operation, *rest)) in enumerate(calls):
            key = _key(tenant)
            commands.append(
                ("EVALSHA", self._sha, 1, key, operation, self._gateway, running_lease_ms, *rest)
            )
            at_server.setdefault(server_of(self._client, key), []).append(i)
        results: list[Any] = [None] * len(calls)
        for server, indices in at_server.items():
            pipeline = server.pipeline(transaction=False)
            for i in indices:
                pipeline.execute_command(*commands[i])
            answers = pipeline.execute(raise_on_error=False)
            for i, answer in zip(indices, answers, strict=True):
                # A key that has moved: nothing was done, and the cluster's client finds it.
                moved = isinstance(answer, AskError)
                results[i] = self._redirected(commands[i]) if moved else answer
        return results

    def _redirected(self, command: tuple[object, ...]) -> Any:
        try:
            return self._client.execute_command(*command)
        except ResponseError as error:
            return error

    def _renew(self) -> None:
        """Tells what really runs here, before the leases end: a gateway that dies tells no more."""
        now = time.monotonic()
        if now - self._renewed < _RENEW_S:
            return
        self._renewed = now
        self._call([(tenant, ("renew", count)) for tenant, count in self._running.items()])
        self._running = +self._running

    def _lose(self, batch: list[_Pending | Settlement]) -> None:
        """Redis is away: whoever waits is told, what is settled from now on is kept."""
        for item in batch:
            if isinstance(item, Settlement):
                self._running[item.tenant] -= item.places
        with self._lock:
            self._up = False
            waiting = [self._inbox.get() for _ in range(self._inbox.qsize())]
        self._on_up(False)
        for kept in waiting:
            if isinstance(kept, Settlement):
                self._inbox.put(kept)
        asked = [item for item in [*batch, *waiting] if isinstance(item, _Pending)]
        self._tell([(item.answer, None, item.request) for item in asked])

    def _tell(self, decided: list[tuple[_Answer, Decision | None, LimitRequest]]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, decided)
        except RuntimeError:
            return  # the loop has ended, and everybody on it

    # On the event loop:

    def _deliver(self, decided: list[tuple[_Answer, Decision | None, LimitRequest]]) -> None:
        for answer, decision, request in decided:
            if not answer.done():
                answer.set_result(decision)
            else:
                self._give_back(request, decision)

    def _give_back(self, request: LimitRequest, decision: Decision | None) -> None:
        """Whoever asked has been cancelled meanwhile."""
        if decision is not None and decision.refused is None:
            second = decision.now_ms // 1000
            wanted = 0 if request.tokens is None else request.wanted
            places = 0 if request.concurrent is None else request.places
            self.settle(Settlement(request.tenant, second, wanted, second, 0, places))


def _key(tenant: str) -> str:
    return f"limits:{{{tenant}}}"
