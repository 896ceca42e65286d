"""Limits counted in Redis, together with all workers and gateways: a round trip for what is asked.

A thread of its own talks to Redis, one pipeline at a time with all that came in meanwhile: many
requests share a round trip, and a busy event loop is never taken for a slow Redis. A tenant has the
key ``limits:{<tenant>}``, and with budgets ``budgets:{<tenant>}``, so all of it is at one server of
a cluster; `script.lua` says what is in them. While a cluster lacks a part, no tenant is counted
there.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from gateway.tenancy.limits import script
from gateway.tenancy.limits.budgets import BudgetReport
from gateway.tenancy.limits.request import Decision, LimitRequest, Settlement, Spending
from gateway.tenancy.limits.script import Call, Own
from lora_store import redis_url
from lora_store.connect import errors, load, server_of
from lora_store.primary import Primary, code_of, describe, failures, is_unavailable
from lora_store.redis_role import ROLE_CHECK_S
from lora_store.refusals import Refusals

log = logging.getLogger(__name__)

# Redis answers in well under a millisecond, but stands still while it forks for a snapshot.
TIMEOUT_S = 0.25
_CONNECT_TIMEOUT_S = 1.0
_RETRY_S = 1.0
_BATCH = 64
_LEASE_S = 15.0
_RENEW_S = 5.0
_FLUSH_S = 2.0
_SAY_LATE_EVERY_S = 60.0

# Beside what makes a server unavailable: codes that say nothing of the key.
_CODES_OF_SERVER = ("BUSY", "MISCONF", "OOM")

# Of no tenant: theirs do not begin with a dot.
_PROBE = ".probe"

_Answer = asyncio.Future["Decision | None"]


class _Pending(NamedTuple):
    request: LimitRequest
    answer: _Answer


_Item = _Pending | Settlement | Spending


class SharedLimits:
    """Use as an async context manager on the event loop that asks."""

    def __init__(
        self,
        url: str,
        on_up: Callable[[bool], None] = lambda up: None,
        *,
        timeout_s: float = TIMEOUT_S,
        on_refused: Callable[[], object] = lambda: None,
        on_budget: Callable[[BudgetReport], object] = lambda report: None,
    ) -> None:
        """`url` in a form of `lora_store.redis_url`; raises ValueError for another.

        `timeout_s` bounds each read.
        `on_up` is called, from any thread, with True if Redis answers in time.
        `on_refused` is called, from a thread, for each tenant whose key holds what does not fit.
        `on_budget` is called, from a thread, for each budget of which tokens were counted.
        """
        # What a request waits behind: others' batches, a cluster's redirections, a proxy that
        # passes bytes on one by one.
        self._patience_s = 2 * timeout_s
        self._connect_timeout_s = max(_CONNECT_TIMEOUT_S, timeout_s)
        self._primary = Primary(
            redis_url.parse(url), timeout_s, connect_timeout_s=self._connect_timeout_s
        )
        self._on_up = on_up
        self._refusals = Refusals(on_refused)
        self._on_budget = on_budget
        self._gateway = uuid.uuid4().hex[:16]
        self._inbox: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._up = False
        self._why = ""
        self._is_late = False
        self._say_late_at = 0.0
        self._closing = threading.Event()
        self._own: defaultdict[str, Own] = defaultdict(Own)
        """By tenant, what this gateway has in Redis; the thread's own."""
        self._kept: deque[Settlement] = deque()
        """Of requests that Redis let in before it went away, for when it is back; the thread's."""
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
        """True while Redis counts. If it is late for one request, the next does not wait for it."""
        return self._up and not self._is_late

    async def take(self, request: LimitRequest) -> Decision | None:
        """Counts the request if no limit is in its way; None when Redis does not in time."""
        answer: _Answer = self._loop.create_future()
        with self._lock:
            if not self.up:
                return None
            self._inbox.put(_Pending(request, answer))
        try:
            # Unlike a timeout around it, this sees an answer that came while the loop was busy.
            await asyncio.wait([answer], timeout=self._patience_s)
        except asyncio.CancelledError:
            if not answer.cancel():  # it came in the same moment
                self._give_back(request, answer.result())
            raise
        if not answer.cancel():
            return answer.result()
        self._set_late(True)
        self._say_late()
        return None

    def _set_late(self, is_late: bool) -> None:
        """Take note that a request was not answered in time, or that answers come again."""
        if is_late != self._is_late:
            with self._lock:
                was_up, self._is_late = self.up, is_late
                if self.up != was_up:
                    self._on_up(self.up)

    def _say_late(self) -> None:
        now = self._loop.time()
        if now >= self._say_late_at:
            self._say_late_at = now + _SAY_LATE_EVERY_S
            log.warning(
                "Redis has not answered within %g s; limits of such requests are counted as "
                "when_redis_is_away says",
                self._patience_s,
            )

    def settle(self, settlement: Settlement) -> None:
        """Returns at once. A settlement that Redis fails on is not told twice: the reservation then
        counts for its minute; the next renewal puts right the places and what is held of budgets.
        """
        self._inbox.put(settlement)

    def spend(self, spending: Spending) -> None:
        """Returns at once. It is told with the tenant's next call, a renewal at the latest, again
        and again until Redis is known to have counted it once."""
        self._inbox.put(spending)

    # In the thread:

    def _work(self, started: Callable[[], object]) -> None:
        if not self._connect():
            log.warning(
                "Redis is away (%s); limits are counted as when_redis_is_away says", self._why
            )
        started()
        ended = False
        while not ended:
            if self._up:
                ended = self._turn()
            elif self._closing.wait(_RETRY_S):
                break
            else:
                self._keep(self._waiting())
                if self._connect():
                    log.info("Redis answers; limits are shared again")
        self._primary.close()

    def _turn(self) -> bool:
        """One round trip; whether it was the last."""
        batch, ended = self._next_batch()
        try:
            # Before a server is found: a settlement that is lost with it must not be renewed.
            calls = [(item, call) for item in batch if (call := self._call_for(item)) is not None]
            with self._primary.use() as client:
                if not batch and not isinstance(client, load().RedisCluster):
                    client.ping()  # a demotion is noticed though nobody asks for anything
                self._send(client, calls)
                batch = []
                self._renew(client, at_once=ended)
        except failures() as error:
            log.warning("limits are not shared now: Redis fails: %s", describe(error))
            self._lose(batch)
        except Exception:  # this thread is what everybody waits for
            log.exception("limits are not shared now")
            self._lose(batch)
        return ended

    def _connect(self) -> bool:
        """Return True if Redis can be used from now on."""
        try:
            with self._primary.use() as client:
                self._sha = client.script_load(script.SCRIPT)
                # Without replicas or memory, say, it takes scripts and lets them write nothing.
                self._call(client, [script.renew(_PROBE, Own(places=1))])
        except failures() as error:
            self._why = describe(error)
            return False
        # Redis may have lost what runs here, or hold what has ended: `_renew` tells it at once.
        self._renewed = 0.0
        with self._lock:
            self._up = True
            self._on_up(self.up)
        return True

    def _next_batch(self) -> tuple[list[_Item], bool]:
        """All that waits, up to a limit, and whether it is the last."""
        batch: list[_Item] = []
        while self._kept and len(batch) < _BATCH:
            batch.append(self._kept.popleft())
        if batch:
            return batch, False
        try:
            # 0 where Redis is just back: it is told at once of what was spent meanwhile.
            due_s = max(0.0, self._renewed + _RENEW_S - time.monotonic())
            due_s = min(due_s, ROLE_CHECK_S)
            item = self._inbox.get(timeout=due_s)
            while item is not None:
                batch.append(item)
                if len(batch) == _BATCH:
                    return batch, False
                item = self._inbox.get_nowait()
        except queue.Empty:
            return batch, False
        return batch, True

    def _send(self, client: Any, calls: list[tuple[_Item, Call]]) -> None:
        if not calls:
            return
        results = self._call(client, [call for _, call in calls])
        decided: list[tuple[_Answer, Decision | None, LimitRequest]] = []
        for (item, _), result in zip(calls, results, strict=True):
            if isinstance(item, _Pending):
                decision = None if result is None else script.decision_of(item.request, result)
                if decision is not None and decision.refused is None:
                    self._count(item.request)
                decided.append((item.answer, decision, item.request))
        if decided:
            self._tell(decided)

    def _call_for(self, item: _Item) -> Call | None:
        """Count an item in `_own`, and return what Redis is asked; None if a later call has it."""
        if isinstance(item, Spending):
            own = self._own[item.tenant]
            # Never fewer: what began before a budget was added must not leave that one out.
            own.budgets, own.changed = {**own.budgets, **item.budgets}, True
            own.spent += item.tokens
            return None
        request = item.request
        own = self._own[request.tenant]
        own.changed |= bool(request.budgets) or "concurrent_requests" in request.limits
        if isinstance(item, _Pending):
            return script.take(request, own)
        if item.places:
            own.places, own.changed = own.places - item.places, True
        if request.budgets:
            own.held += item.kept - item.released
        return script.settle(item, own)

    def _count(self, request: LimitRequest) -> None:
        """A request that was let in."""
        own = self._own[request.tenant]
        if "concurrent_requests" in request.limits:
            own.places += request.places
        if request.budgets:
            own.held += request.tokens
            own.budgets = {**own.budgets, **request.budgets}

    def _call(self, client: Any, calls: Sequence[Call]) -> list[list[int] | None]:
        """The script's answers, in one round trip; None, as if Redis had done nothing, for what
        failed by its key or makes no sense.

        Raises the first error that is not a key's.
        """
        results, lost = self._pipelined(client, calls), errors().NoScriptError
        if any(isinstance(result, lost) for result in results):
            # Somebody emptied Redis' cache of scripts; nothing of such a call was done.
            self._sha = client.script_load(script.SCRIPT)
            again = [i for i, result in enumerate(results) if isinstance(result, lost)]
            renewed = self._pipelined(client, [calls[i] for i in again])
            for i, result in zip(again, renewed, strict=True):
                results[i] = result
        return [self._answer(call, result) for call, result in zip(calls, results, strict=True)]

    def _answer(self, call: Call, result: Any) -> list[int] | None:
        if isinstance(result, Exception):
            of_the_key = type(result) in (errors().ResponseError, errors().TryAgainError)
            of_the_server = is_unavailable(result) or code_of(result) in _CODES_OF_SERVER
            if of_the_server or not of_the_key:
                raise result
            self._refusals.add(call.key, result)
            return None
        if not script.is_an_answer(call, result):
            self._refusals.add(call.key, "the script answers nonsense")
            return None
        if call.limits and (unfit := result[3]):
            self._refusals.add(call.key, f"{unfit} fields of no known form")
        if call.budgets:
            own = self._own[call.tenant]
            own.known = max(own.known, call.spent)
            for report in script.reports_of(call, result):
                self._on_budget(report)
        answer: list[int] = result
        return answer

    def _pipelined(self, client: Any, calls: Sequence[Call]) -> list[Any]:
        """By server, where there are several; a cluster client's own pipeline asks twice."""
        lease_ms = int(_LEASE_S * 1000)
        commands = [call.command(self._sha, self._gateway, lease_ms) for call in calls]
        at_server: dict[Any, list[int]] = {}
        for i, call in enumerate(calls):
            at_server.setdefault(server_of(client, call.key), []).append(i)
        results: list[Any] = [None] * len(calls)
        for server, indices in at_server.items():
            pipeline = server.pipeline(transaction=False)
            for i in indices:
                pipeline.execute_command(*commands[i])
            answers = pipeline.execute(raise_on_error=False)
            for i, answer in zip(indices, answers, strict=True):
                # A key that has moved: nothing was done, and the cluster's client finds it.
                moved = isinstance(answer, errors().AskError)
                results[i] = _redirected(client, commands[i]) if moved else answer
        return results

    def _renew(self, client: Any, *, at_once: bool) -> None:
        """Tells what really runs here, before the leases end: a gateway that dies tells no more."""
        now = time.monotonic()
        if now - self._renewed < _RENEW_S and not at_once:
            return
        self._renewed = now
        changed = [(tenant, own) for tenant, own in self._own.items() if own.changed]
        self._call(client, [script.renew(tenant, own) for tenant, own in changed])
        for _, own in changed:
            own.changed = bool(own.places or own.held or own.spent > own.known)

    def _lose(self, batch: list[_Item]) -> None:
        """Redis is away: whoever waits is told, what is settled from now on is kept."""
        with self._lock:
            self._up = False
            waiting = self._waiting()
            self._on_up(False)
        self._keep(waiting)
        asked = [item for item in [*batch, *waiting] if isinstance(item, _Pending)]
        self._tell([(item.answer, None, item.request) for item in asked])

    def _waiting(self) -> list[_Item | None]:
        """All of the inbox, which is empty then."""
        return [self._inbox.get() for _ in range(self._inbox.qsize())]

    def _keep(self, waiting: list[_Item | None]) -> None:
        """What Redis is to be told once it is back.

        What is spent is added up, as it goes on for as long as Redis is away; settlements are of
        requests that began before that alone.
        """
        for item in waiting:
            if isinstance(item, Spending):
                self._call_for(item)
            elif isinstance(item, Settlement):
                self._kept.append(item)
            elif item is None:
                self._inbox.put(None)

    def _tell(self, decided: list[tuple[_Answer, Decision | None, LimitRequest]]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, decided)
        except RuntimeError:
            return  # the loop has ended, and everybody on it

    # On the event loop:

    def _deliver(self, decided: list[tuple[_Answer, Decision | None, LimitRequest]]) -> None:
        self._set_late(False)
        for answer, decision, request in decided:
            if not answer.done():
                answer.set_result(decision)
            else:
                self._give_back(request, decision)

    def _give_back(self, request: LimitRequest, decision: Decision | None) -> None:
        """Whoever asked has been cancelled meanwhile."""
        if decision is not None and decision.refused is None:
            second = decision.now_ms // 1000
            places = request.places if "concurrent_requests" in request.limits else 0
            self.settle(Settlement(request, second, request.tokens, second, places=places))


def _redirected(client: Any, command: tuple[object, ...]) -> Any:
    try:
        return client.execute_command(*command)
    except errors().ResponseError as error:
        return error
