"""Asynchronous access to the conversations in Redis (`SharedConversations`), through threads.

Failures of Redis are logged and counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from gateway.conversations.shared import PollResult, RedisState, SharedConversations
from gateway.conversations.stats import ConversationStats
from lora_store.primary import NO_REPLICAS, RedisUnavailable, code_of, describe, failure_types

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_THREADS = 4
_RECOVERY_S = 10.0
"""Maximum seconds for which a failure is reported to operators after it occurred last.

A successful call of the same type ends the report earlier. While Redis accepts no writes, the time
limit does not apply.
"""


class _Failure(NamedTuple):
    why: str
    at: float


class RedisDown(Exception):
    """Redis is unavailable, or has refused a command."""


class RedisThreads:
    """Threads that call Redis.

    After a call has found that Redis is unavailable, `run` raises RedisDown without calling Redis.
    Only `poll` still calls Redis. When a poll succeeds, `run` calls Redis again.
    """

    def __init__(self, shared: SharedConversations, stats: ConversationStats) -> None:
        self.state = RedisState()
        self.is_up = False
        self.stale_s = shared.stale_s
        self._shared = shared
        self._stats = stats
        # Present failures, by type of call ("read", "put", ...). The key "" means that the server
        # is unavailable for all calls. Each type has its own entry: a full Redis refuses writes but
        # still serves reads, so a successful read must not remove the failure of a write.
        self._failures: dict[str, _Failure] = {}
        self._threads = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="conversations-redis")

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        self._shared.close()

    async def run(self, work: Callable[[SharedConversations], T], kind: str = "read") -> T:
        """Run `work` in a thread, and return its result. Raise RedisDown if Redis fails.

        `kind` is the type of the call, such as "read" or "put". After a successful call, operators
        no longer see a failure of the same type.
        """
        if not self.is_up:
            raise RedisDown

        def run_if_up(shared: SharedConversations) -> T:
            # Check again: Redis may have failed while this call waited for a thread.
            if not self.is_up:
                raise RedisDown
            return work(shared)

        return await self._run(run_if_up, kind)

    @property
    def problem(self) -> str:
        """Message for operators while a call to Redis fails; "" while Redis works.

        While Redis fails, gateways cannot share conversations.
        """
        why = next((failure.why for failure in self._failures.values()), "")
        return f"conversations are not shared now: Redis fails: {why}" if why else ""

    @property
    def epoch(self) -> int:
        """`RedisState.epoch` at the last poll; 0 before the first poll."""
        return self.state.epoch

    async def poll(
        self, gateway: str = "", report: str = "", report_of: tuple[int, int] = (0, 0)
    ) -> PollResult:
        """Run `SharedConversations.poll` in a thread, and store the returned state in `self.state`.

        Raise RedisDown if Redis fails.
        """
        result = await self._run(
            lambda shared: shared.poll(self.state, gateway, report, report_of), "look"
        )
        # Do not replace a newer state: two polls may run at the same time, and the poll that began
        # later may finish first. Also ignore a state whose `since` is 0: Redis refuses writes, for
        # example because its memory is full, so the state is incomplete.
        if result.state.since and result.state.seen > self.state.seen:
            self.state = result.state
        self.is_up = True
        if result.state.since:  # Redis accepts writes
            before = time.monotonic() - _RECOVERY_S
            self._end([kind for kind, failure in self._failures.items() if failure.at < before])
        return result

    async def _run(self, work: Callable[[SharedConversations], T], kind: str) -> T:
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._threads, lambda: work(self._shared))
        except failure_types() as error:
            self._stats.redis_failures += 1
            cause = error.__cause__ or error
            if isinstance(error, RedisUnavailable) and code_of(cause) != NO_REPLICAS:
                self.is_up = False
                kind = ""
            why = describe(error)
            if not self._failures:
                log.warning("conversations are not shared now: Redis fails: %s", why)
            self._failures[kind] = _Failure(why, time.monotonic())
            raise RedisDown from error
        self._end(["", kind])
        return result

    def _end(self, kinds: Sequence[str]) -> None:
        ended = [self._failures.pop(kind, None) for kind in kinds]
        if any(ended) and not self._failures:
            log.info("conversations are shared again")
