"""Cached result of an asynchronous function, which all callers share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

PERIOD_S = 1.0
# Minimum time between the starts of two computations, as a multiple of the last duration, so that
# they use at most a tenth of the process' time. `_MAX_REST_S` limits the pause, because most of the
# duration may be spent waiting for another worker.
_REST_FACTOR, _MAX_REST_S = 10.0, 5.0


class SharedResult(Generic[T]):
    """Cached result of the function `make`, which is called at most once per second.

    Use an instance on one event loop only.
    """

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._lock = asyncio.Lock()
        self._result: T | None = None
        self.fresh_until = 0.0
        """Time until which the result is not computed again, in seconds of `time.monotonic`."""

    async def get(self) -> T:
        """Return the latest result. Concurrent callers wait for the same computation."""
        async with self._lock:
            began = time.monotonic()
            if self._result is None or began >= self.fresh_until:
                self._result = await self._make()
                took = time.monotonic() - began
                self.fresh_until = began + min(
                    max(PERIOD_S, _REST_FACTOR * took), _MAX_REST_S + took
                )
            return self._result
