"""Blocking work off the event loop, and whether Redis answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from adapters.errors import StoreError, StoreUnavailable, store_errors
from lora_store.redis import RedisTier
from lora_store.stats import Stats

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class Link:
    """Shared by the parts of one store. `redis` is None when the store has none.

    While Redis is known to be away nobody waits for it: only `probe` asks, the others fail or do
    without at once.
    """

    def __init__(self, redis: RedisTier | None, stats: Stats) -> None:
        self._redis = redis
        self._stats = stats
        self._told: bool | None = None
        self.failure = ""
        """Why Redis cannot be used; empty while it can."""
        self._disk_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="lora-disk")
        # Of their own: whoever needs the disk alone waits for no Redis that is silent.
        self._redis_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="lora-redis")

    @property
    def configured(self) -> bool:
        """Whether the store has a Redis at all."""
        return self._redis is not None

    @property
    def redis(self) -> RedisTier | None:
        """Redis, if it answered last time."""
        return self._redis if self._stats.redis_up else None

    async def run(self, work: Callable[[], _T]) -> _T:
        """`work` in a thread; an `OSError` of the disk becomes a `StoreError`."""
        return await _run(self._disk_threads, work)

    async def call(self, work: Callable[[RedisTier], _T]) -> _T:
        """`work` with Redis in a thread. Raises `StoreUnavailable` at once while it is away."""
        redis = self.redis
        if redis is None:
            raise StoreUnavailable(self.failure or "Redis is not there")
        return await self._counted(lambda: self._asked(redis, work))

    async def with_or_without(self, work: Callable[[RedisTier | None], _T]) -> _T:
        """`work` with Redis; again without it when it is away or refuses."""
        if self.redis is not None:
            try:
                return await self.call(work)
            except StoreError as error:
                _LOG.warning("going on without Redis: %s", error)
        return await self.run(lambda: work(None))

    async def probe(self, work: Callable[[RedisTier], _T]) -> _T | None:
        """`work` with Redis even if it was away; None, and away, when it fails."""
        if self._redis is None:
            return None
        try:
            result = await self._counted(partial(work, self._redis))
        except StoreError as error:
            self._set_up(False, str(error))
            return None
        self._set_up(True, "")
        return result

    async def close(self) -> None:
        for threads in (self._disk_threads, self._redis_threads):
            await asyncio.to_thread(threads.shutdown, cancel_futures=True)
        if self._redis is not None:
            self._redis.close()

    def _asked(self, redis: RedisTier, work: Callable[[RedisTier], _T]) -> _T:
        """In a thread. Whoever waited for one meanwhile does not find out anew, after one more
        timeout, that Redis is silent."""
        if not self._stats.redis_up:
            raise StoreUnavailable("Redis is not there")
        try:
            return work(redis)
        except StoreUnavailable:
            self._stats.redis_up = False
            raise

    async def _counted(self, work: Callable[[], _T]) -> _T:
        try:
            return await _run(self._redis_threads, work)
        except StoreError as error:
            self.failed(error)
            raise

    def failed(self, error: StoreError) -> None:
        """Count what a command to Redis ended with."""
        self._stats.redis_errors += 1
        if isinstance(error, StoreUnavailable):
            self._set_up(False, str(error))

    def _set_up(self, up: bool, reason: str) -> None:
        self._stats.redis_up = up
        self.failure = reason
        if up != self._told:
            self._told = up
            _LOG.log(
                logging.INFO if up else logging.WARNING,
                "Redis answers" if up else f"Redis is away, going on from disk: {reason}",
            )


async def _run(threads: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
    with store_errors("the adapter folder"):
        return await asyncio.get_running_loop().run_in_executor(threads, work)
