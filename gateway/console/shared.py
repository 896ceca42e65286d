"""What is worked out once for all who look, and only while somebody does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")

PERIOD_S = 1.0
# The least time between two, in times of what one took, so that whoever looks has a tenth of this
# process at most. But it may be that another worker was late.
_REST_FACTOR, _MAX_REST_S = 10.0, 5.0


class SharedResult(Generic[T]):
    """Belongs to one event loop. `make` is called again once a second at most."""

    def __init__(self, make: Callable[[], Awaitable[T]]) -> None:
        self._make = make
        self._lock = asyncio.Lock()
        self._result: T | None = None
        self.fresh_until = 0.0
        """When there may be another, in `time.monotonic`."""

    async def get(self) -> T:
        """The latest. Those who come while it is made wait for the same."""
        async with self._lock:
            began = time.monotonic()
            if self._result is None or began >= self.fresh_until:
                self._result = await self._make()
                took = time.monotonic() - began
                self.fresh_until = began + min(
                    max(PERIOD_S, _REST_FACTOR * took), _MAX_REST_S + took
                )
            return self._result
