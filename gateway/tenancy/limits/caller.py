"""Thread that runs the Lua script `script.lua`, which counts tenants' limits in Redis.

The thread sends many calls of the script in one pipeline, so that they share one round trip. It
measures the timeouts itself, so a busy event loop is never mistaken for a slow Redis. In a Redis
cluster, all keys of a tenant are on one server. If any server of the cluster fails, Redis is
considered down for all tenants.

See decision 090 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gateway.tenancy.limits import script
from gateway.tenancy.limits.lease import LEASE_S, Lease
from gateway.tenancy.limits.request import LimitRequest
from gateway.tenancy.limits.script import ScriptCall
from lora_store import redis_url
from lora_store.connect import errors, load, server_of
from lora_store.primary import Primary, code_of, describe, failure_types, is_unavailable
from lora_store.redis_role import ROLE_CHECK_S
from lora_store.refusals import RefusedValues

log = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 1.0
_RECONNECT_INTERVAL_S = 1.0
_MAX_BATCH_CALLS = 64
_FLUSH_S = 2.0

# Redis error codes that mean a problem of the server, not of the key in the command. The function
# `is_unavailable` recognizes further codes of this type.
_CODES_OF_SERVER = ("BUSY", "MISCONF", "OOM")

# Tenant name for test calls. Names of real tenants never begin with a dot.
_PROBE = ".probe"

Answer = tuple[ScriptCall, "list[int] | None"]
"""A call of the script, and the list of integers that the script has returned.

The list is None if the call has failed: Redis may or may not have executed it.
"""


class ScriptCaller:
    """Thread that calls the Lua script `script.lua` in Redis.

    Code on an event loop submits the calls. Callbacks on the same event loop get the script's
    answers.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        *,
        on_up: Callable[[bool], None],
        on_refused: Callable[[], object],
        on_answers: Callable[[Sequence[Answer]], None],
        on_connected: Callable[[], None],
    ) -> None:
        """Prepare a caller. `start` connects to Redis.

        Args:
            url: URL of Redis, in a form that `lora_store.redis_url` describes.
            timeout_s: timeout of each read in seconds.
            on_up: called with the value of the property `up` when the value may have changed. The
                call may come from any thread.
            on_refused: called from this object's thread when a tenant's key in Redis has an
                invalid value.
            on_answers: called on the event loop with the answers to submitted calls.
            on_connected: called on the event loop after each new connection.

        Raises:
            ValueError: the URL is invalid.
        """
        self._connect_timeout_s = max(_CONNECT_TIMEOUT_S, timeout_s)
        self._primary = Primary(
            redis_url.parse(url), timeout_s, connect_timeout_s=self._connect_timeout_s
        )
        self._on_up = on_up
        self._refusals = RefusedValues(on_refused)
        self._on_answers = on_answers
        self._on_connected = on_connected
        self._gateway = uuid.uuid4().hex[:16]
        self._inbox: queue.SimpleQueue[ScriptCall | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_connected = False
        self._is_late = False
        self._why = ""
        self._closing = threading.Event()
        self._sha = ""
        self.epoch = 0
        """Number of times that the connection to Redis was lost.

        Each time, Redis may have been restarted without its data.
        """

    @property
    def up(self) -> bool:
        """True while Redis is connected and answers in time.

        The value becomes False when a request has waited for Redis until the request's timeout. The
        next answer of Redis makes it True again. While it is False, no further request starts to
        wait for Redis.
        """
        return self._is_connected and not self._is_late

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        started = asyncio.Event()
        done = partial(self._post, started.set)
        # Use a daemon thread. A thread of a pool would delay the interpreter's exit.
        self._thread = threading.Thread(target=self._work, args=(done,), name="limits", daemon=True)
        self._thread.start()
        # Wait for the connection, so that the first request is counted in Redis. Limit the wait,
        # because resolving a name may take long.
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await started.wait()
        except TimeoutError:
            log.warning("Redis does not answer; limits are not shared yet")

    async def close(self) -> None:
        """Send the submitted calls to Redis, and end the thread. Wait for at most two seconds."""
        self._closing.set()
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, _FLUSH_S)

    def submit(self, call: ScriptCall) -> bool:
        """Submit a call, which the thread will send to Redis. Return True if it was accepted.

        While Redis is down, calls are not accepted. `on_answers` is called with the answer to each
        accepted call; the answer is None if Redis fails.
        """
        with self._lock:
            if self._is_connected:
                self._inbox.put(call)
            return self._is_connected

    def set_late(self, is_late: bool) -> None:
        """Record that a request has waited for Redis until its timeout (`is_late`).

        Call this with False at the next answer of Redis.
        """
        if is_late != self._is_late:
            with self._lock:
                was_up, self._is_late = self.up, is_late
                if self.up != was_up:
                    self._on_up(self.up)

    def _post(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            return  # ignore the error: the event loop is closed, so nothing waits for the callback

    # The methods below run in the thread of this `ScriptCaller`, not on the event loop.

    def _work(self, started: Callable[[], object]) -> None:
        if not self._connect():
            log.warning(
                "Redis is away (%s); limits are counted as when_redis_is_away says", self._why
            )
        started()
        ended = False
        while not ended:
            if self._is_connected:
                ended = self._make_round_trip()
            elif self._closing.wait(_RECONNECT_INTERVAL_S):
                break
            elif self._connect():
                log.info("Redis answers; limits are shared again")
        self._primary.close()

    def _make_round_trip(self) -> bool:
        """Send the waiting calls to Redis in one round trip. Return True if the thread must end."""
        batch, ended = self._next_batch()
        try:
            with self._primary.use() as client:
                if batch:
                    answers = self._run(client, batch)
                    self._post(self._on_answers, [*zip(batch, answers, strict=True)])
                elif not isinstance(client, load().RedisCluster):
                    client.ping()  # without calls, detect here if the server becomes a replica
        except failure_types() as error:
            log.warning("limits are not shared now: Redis fails: %s", describe(error))
            self._disconnect(batch)
        except Exception:  # do not end the thread: all requests with limits depend on it
            log.exception("limits are not shared now")
            self._disconnect(batch)
        return ended

    def _connect(self) -> bool:
        """Connect to Redis and run the script once as a test. Return True on success."""
        probe = LimitRequest(tenant=_PROBE, limits={"concurrent_requests": 10**9}, slots=1)
        try:
            with self._primary.use() as client:
                self._sha = client.script_load(script.SCRIPT)
                # Test with a script that writes. If Redis has too few replicas or no free memory,
                # it loads scripts but refuses their writes.
                self._run(client, [Lease(_PROBE, lambda: 0.0).call(probe)])
        except failure_types() as error:
            self._why = describe(error)
            return False
        with self._lock:
            self._is_connected = True
            self._on_up(self.up)
        self._post(self._on_connected)
        return True

    def _next_batch(self) -> tuple[list[ScriptCall], bool]:
        """Wait for submitted calls. Return at most 64 calls, and True if the thread must end.

        Return an empty list if no call is submitted within `ROLE_CHECK_S` seconds, so that the
        thread checks if the Redis server is still the primary.
        """
        batch: list[ScriptCall] = []
        try:
            call = self._inbox.get(timeout=ROLE_CHECK_S)
            while call is not None:
                batch.append(call)
                if len(batch) == _MAX_BATCH_CALLS:
                    return batch, False
                call = self._inbox.get_nowait()
        except queue.Empty:
            return batch, False
        return batch, True

    def _run(self, client: Any, calls: Sequence[ScriptCall]) -> list[list[int] | None]:
        """Run calls in one round trip, and return the script's answers.

        An answer is None if the script has returned an invalid answer, or has failed because of an
        invalid value in the tenant's key. Any other error of a call is raised.
        """
        results, lost = self._run_pipelines(client, calls), errors().NoScriptError
        if any(isinstance(result, lost) for result in results):
            # Redis has lost the script, so these calls had no effect. Load the script again, and
            # repeat the calls.
            self._sha = client.script_load(script.SCRIPT)
            again = [i for i, result in enumerate(results) if isinstance(result, lost)]
            renewed = self._run_pipelines(client, [calls[i] for i in again])
            for i, result in zip(again, renewed, strict=True):
                results[i] = result
        return [self._answer(call, result) for call, result in zip(calls, results, strict=True)]

    def _answer(self, call: ScriptCall, result: Any) -> list[int] | None:
        if isinstance(result, Exception):
            of_the_key = type(result) in (errors().ResponseError, errors().TryAgainError)
            of_the_server = is_unavailable(result) or code_of(result) in _CODES_OF_SERVER
            if of_the_server or not of_the_key:
                raise result
            self._refusals.add(call.key, result)
            return None
        if not script.is_answer(call, result):
            self._refusals.add(call.key, "the script answers nonsense")
            return None
        answer: list[int] = result
        if unfit := script.count_unfit_fields(answer):
            self._refusals.add(call.key, f"{unfit} fields of no known form")
        return answer

    def _run_pipelines(self, client: Any, calls: Sequence[ScriptCall]) -> list[Any]:
        """Run calls in one pipeline for each server. Return results and errors in order of calls.

        The pipeline of redis-py's cluster client is not used: it would need two round trips.
        """
        lease_ms = int(LEASE_S * 1000)
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
                # If the key has moved to another server of the cluster, the call had no effect.
                # Repeat the call with the cluster's client, which follows the redirection.
                moved = isinstance(answer, errors().AskError)
                results[i] = _redirect(client, commands[i]) if moved else answer
        return results

    def _disconnect(self, batch: Sequence[ScriptCall]) -> None:
        """Mark Redis as down, and answer the calls of `batch` and all queued calls with None.

        Redis may have lost its record of the units (requests, tokens, slots) that it has granted to
        this process in advance. `epoch` is therefore increased, so that these units are not used.
        """
        with self._lock:
            self.epoch += 1
            self._is_connected = False
            waiting = [self._inbox.get() for _ in range(self._inbox.qsize())]
            self._on_up(False)
        if None in waiting:
            self._inbox.put(None)
        calls = [*batch, *(call for call in waiting if call is not None)]
        self._post(self._on_answers, [(call, None) for call in calls])


def _redirect(client: Any, command: tuple[object, ...]) -> Any:
    try:
        return client.execute_command(*command)
    except errors().ResponseError as error:
        return error
