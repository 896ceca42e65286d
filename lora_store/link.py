"""Threads for blocking work of the adapter store, and detection of an unavailable Redis."""

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
    """Executor that runs the blocking disk and Redis work of one adapter store in threads.

    Pass None as `redis` for a store without Redis. After a command has found that Redis is
    unavailable, only `probe` sends commands to Redis. Until `probe` succeeds, `call` immediately
    raises `StoreUnavailable`, and `call_or_run` runs the given function without Redis.
    """

    def __init__(self, redis: RedisTier | None, stats: StoreStats) -> None:
        self._redis = redis
        self._stats = stats
        self._logged_up: bool | None = None
        self.failure = ""
        """Reason why Redis cannot be used; empty while Redis can be used."""
        self._disk_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="lora-disk")
        # Use separate threads for Redis, so that work on the disk does not wait for a Redis that
        # does not answer.
        self._redis_threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="lora-redis")

    @property
    def is_configured(self) -> bool:
        """True if the store is configured with a Redis, even if that Redis is down."""
        return self._redis is not None

    @property
    def redis(self) -> RedisTier | None:
        """The store's `RedisTier`; None without Redis, or if Redis was down at the last command."""
        return self._redis if self._stats.redis_up else None

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread for disk work, and return its result.

        An `OSError` is converted to a `StoreError`.
        """
        return await _run(self._disk_threads, work)

    async def call(self, work: Callable[[RedisTier], _T]) -> _T:
        """Run `work` with the Redis tier in a thread, and return its result.

        Raise `StoreUnavailable` at once if Redis is known to be down.
        """
        redis = self.redis
        if redis is None:
            raise StoreUnavailable(self.failure or "Redis is not there")
        return await self._run_counted(lambda: self._call_if_up(redis, work))

    async def call_or_run(self, work: Callable[[RedisTier | None], _T]) -> _T:
        """Run `work` with the Redis tier, and return its result.

        If Redis is down or refuses a command, run `work` with None as its argument instead.
        """
        if self.redis is not None:
            try:
                return await self.call(work)
            except StoreError as error:
                _LOG.warning("continuing without Redis: %s", error)
        return await self.run(lambda: work(None))

    async def probe(self, work: Callable[[RedisTier], _T]) -> _T | None:
        """Run `work` with the Redis tier, even if Redis was unavailable at the last command.

        Return the result of `work`, or None if Redis fails or the store has no Redis.
        """
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
        """Run `work`, unless Redis has become unavailable while the caller waited for a thread.

        Several callers may wait for a thread while an earlier caller's command times out. Without
        this check, each waiting caller would also send a command and wait for its timeout.
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
        """Count a failed Redis command, and mark Redis as down if it is unavailable."""
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
