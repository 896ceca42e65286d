"""Cache for the result of an asynchronous function, so that all callers share one computation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

PERIOD_S = 1.0
# `_REST_FACTOR` is the minimum time between the starts of two computations, as a multiple of the
# duration of the first. Computations therefore take at most a tenth of the process' time. However,
# the pause between two computations is at most `_MAX_REST_S` seconds, because a long computation
# may only have waited for another worker.
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
