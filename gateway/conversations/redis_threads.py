"""Redis for the event loop: threads for its calls, and whether it is there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from gateway.conversations.shared import Known, Look, SharedConversations
from gateway.conversations.stats import Stats
from lora_store.primary import NO_REPLICAS, RedisUnavailable, code_of, describe, failure_types

log = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS = 4
_QUIET_S = 10.0
"""Seconds without a failure of a kind after which one is over, if Redis takes writes."""


class _Failure(NamedTuple):
    why: str
    at: float


class RedisAway(Exception):
    """Redis does not answer, or refuses."""


class RedisThreads:
    """While Redis is away nobody waits for it: `look` alone asks whether it is back."""

    def __init__(self, shared: SharedConversations, stats: Stats) -> None:
        self.known = Known()
        self.up = False
        self.stale_s = shared.stale_s
        self._shared = shared
        self._stats = stats
        # By kind of call, and under "" that of the server: a Redis that is full, say, is read as
        # ever. What works must not end the failure of what does not.
        self._failures: dict[str, _Failure] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="conversations-redis")

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        self._shared.close()

    async def run(self, work: Callable[[SharedConversations], T], kind: str = "read") -> T:
        """Return what `work`, a call of that `kind`, returns. Raises RedisAway."""
        if not self.up:
            raise RedisAway

        def unless_away(shared: SharedConversations) -> T:
            # It may have been found away while this waited for a thread.
            if not self.up:
                raise RedisAway
            return work(shared)

        return await self._run(unless_away, kind)

    @property
    def problem(self) -> str:
        """Why nothing is shared now; empty where it is."""
        why = next((failure.why for failure in self._failures.values()), "")
        return f"conversations are not shared now: Redis fails: {why}" if why else ""

    @property
    def epoch(self) -> int:
        """As last seen; 0 before."""
        return self.known.epoch

    async def look(self, gateway: str = "", says: str = "", of: tuple[int, int] = (0, 0)) -> Look:
        """See `SharedConversations.look`. Raises RedisAway."""
        look = await self._run(lambda shared: shared.look(self.known, gateway, says, of), "look")
        # Else a later one was faster, or Redis is full and tells nothing.
        if look.known.since and look.known.seen > self.known.seen:
            self.known = look.known
        self.up = True
        if look.known.since:  # it has written
            before = time.monotonic() - _QUIET_S
            self._end([kind for kind, failure in self._failures.items() if failure.at < before])
        return look

    async def _run(self, work: Callable[[SharedConversations], T], kind: str) -> T:
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._threads, lambda: work(self._shared))
        except failure_types() as error:
            self._stats.redis_failures += 1
            cause = error.__cause__ or error
            if isinstance(error, RedisUnavailable) and code_of(cause) != NO_REPLICAS:
                self.up = False
                kind = ""
            why = describe(error)
            if not self._failures:
                log.warning("conversations are not shared now: Redis fails: %s", why)
            self._failures[kind] = _Failure(why, time.monotonic())
            raise RedisAway from error
        self._end(["", kind])
        return result

    def _end(self, kinds: Sequence[str]) -> None:
        ended = [self._failures.pop(kind, None) for kind in kinds]
        if any(ended) and not self._failures:
            log.info("conversations are shared again")
