"""Threads for blocking work, and the state of the connection to Redis."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from adapters.errors import StoreError, StoreUnavailable, store_errors
from lora_store.redis import RedisTier
from lora_store.stats import StoreStats

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")


class Link:
    """Runs blocking work for all parts of one store. `redis` is None if the store has no Redis.

    While Redis is known to be down, no caller waits for it: only `probe` asks it, other calls fail
    or run without it at once.
    """

    def __init__(self, redis: RedisTier | None, stats: StoreStats) -> None:
        self._redis = redis
        self._stats = stats
        self._logged_up: bool | None = None
        self.failure = ""
        """Why Redis cannot be used; empty while it can."""
        self._disk_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="lora-disk")
        # Separate threads: work on the disk alone does not wait for a silent Redis.
        self._redis_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="lora-redis")

    @property
    def is_configured(self) -> bool:
        """True if the store has a Redis."""
        return self._redis is not None

    @property
    def redis(self) -> RedisTier | None:
        """Redis, if it answered last time."""
        return self._redis if self._stats.redis_up else None

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread. Raise `StoreError` in place of an `OSError` of the disk."""
        return await _run(self._disk_threads, work)

    async def call(self, work: Callable[[RedisTier], _T]) -> _T:
        """Run `work` with Redis in a thread. Raise `StoreUnavailable` at once if Redis is down."""
        redis = self.redis
        if redis is None:
            raise StoreUnavailable(self.failure or "Redis is not there")
        return await self._run_counted(lambda: self._call_if_up(redis, work))

    async def call_or_run(self, work: Callable[[RedisTier | None], _T]) -> _T:
        """Run `work` with Redis; run it again with None if Redis is down or refuses."""
        if self.redis is not None:
            try:
                return await self.call(work)
            except StoreError as error:
                _LOG.warning("continuing without Redis: %s", error)
        return await self.run(lambda: work(None))

    async def probe(self, work: Callable[[RedisTier], _T]) -> _T | None:
        """Run `work` with Redis even if it was down; return None if it fails."""
        if self._redis is None:
            return None
        try:
            result = await self._run_counted(partial(work, self._redis))
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

    def _call_if_up(self, redis: RedisTier, work: Callable[[RedisTier], _T]) -> _T:
        """Call Redis in a thread, unless it went down since.

        Callers that waited for a thread need not each wait for another timeout.
        """
        if not self._stats.redis_up:
            raise StoreUnavailable("Redis is not there")
        try:
            return work(redis)
        except StoreUnavailable:
            self._stats.redis_up = False
            raise

    async def _run_counted(self, work: Callable[[], _T]) -> _T:
        try:
            return await _run(self._redis_threads, work)
        except StoreError as error:
            self.record_failure(error)
            raise

    def record_failure(self, error: StoreError) -> None:
        """Count the error of a command to Redis."""
        self._stats.redis_errors += 1
        if isinstance(error, StoreUnavailable):
            self._set_up(False, str(error))

    def _set_up(self, up: bool, reason: str) -> None:
        self._stats.redis_up = up
        self.failure = reason
        if up != self._logged_up:
            self._logged_up = up
            _LOG.log(
                logging.INFO if up else logging.WARNING,
                "Redis answers" if up else f"Redis is away, continuing from disk: {reason}",
            )


async def _run(threads: ThreadPoolExecutor, work: Callable[[], _T]) -> _T:
    with store_errors("the adapter folder"):
        return await asyncio.get_running_loop().run_in_executor(threads, work)
