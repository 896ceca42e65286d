"""Redis for the event loop: threads for its calls, and whether it is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.conversations.shared import Known, Look, SharedConversations
from gateway.conversations.stats import Stats
from lora_store.primary import RedisUnavailable, describe, failures

log = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS = 4


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
        self._fails = False
        self._why = ""
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="conversations-redis")

    async def close(self) -> None:
        await asyncio.to_thread(self._threads.shutdown)
        self._shared.close()

    async def run(self, work: Callable[[SharedConversations], T]) -> T:
        """Raises RedisAway."""
        if not self.up:
            raise RedisAway

        def unless_away(shared: SharedConversations) -> T:
            # It may have been found away while this waited for a thread.
            if not self.up:
                raise RedisAway
            return work(shared)

        return await self._run(unless_away)

    @property
    def problem(self) -> str:
        """Why nothing is shared now; empty where it is."""
        return f"conversations are not shared now: Redis fails: {self._why}" * self._fails

    @property
    def epoch(self) -> int:
        """As last seen; 0 before."""
        return self.known.epoch

    async def look(self, gateway: str = "", says: str = "", of: tuple[int, int] = (0, 0)) -> Look:
        """See `SharedConversations.look`. Raises RedisAway."""
        look = await self._run(lambda shared: shared.look(self.known, gateway, says, of))
        # Else a later one was faster, or Redis is full and tells nothing.
        if look.known.since and look.known.seen > self.known.seen:
            self.known = look.known
        self.up = True
        return look

    async def _run(self, work: Callable[[SharedConversations], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            result = await loop.run_in_executor(self._threads, lambda: work(self._shared))
        except failures() as error:
            self._stats.redis_failures += 1
            if isinstance(error, RedisUnavailable):
                self.up = False
            if not self._fails:
                self._fails = True
                self._why = describe(error)
                log.warning("conversations are not shared now: Redis fails: %s", self._why)
            raise RedisAway from error
        if self._fails:
            self._fails = False
            log.info("conversations are shared again")
        return result
