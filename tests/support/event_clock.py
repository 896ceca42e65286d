"""The event loop's clock, which a test puts forward: what would take a minute has taken it.

A deadline that is short enough to wait for is one that a busy machine misses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

# In steps, in which a process that stood still for a while catches up.
_STEPS, _STEP_S = 40, 0.005


class EventClock:
    """Of the running event loop. Make it before anything asks that loop for its time."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._real, self._ahead = loop.time, 0.0
        self._stands: float | None = None
        loop.time = self._time  # type: ignore[method-assign]

    def _time(self) -> float:
        return self._real() + self._ahead if self._stands is None else self._stands

    def leap(self, seconds: float) -> None:
        self._ahead += seconds

    @contextmanager
    def standing(self) -> Iterator[None]:
        """No deadline comes, however long a busy machine takes for what is done here.

        No sleep ends either, but that of 0 s.
        """
        self._stands = self._time()
        try:
            yield
        finally:
            self._ahead = self._stands - self._real()
            self._stands = None

    async def leap_once(
        self, happened: Callable[[], bool], asked: Awaitable[Any], seconds: float = 3600
    ) -> Any:
        """What `asked` returns: so long after `happened` and what follows from it at once.

        If it never happens, `asked` ends by itself.
        """
        asking = asyncio.ensure_future(asked)
        while not asking.done() and not happened():
            await asyncio.sleep(_STEP_S)
        if not asking.done():
            for _ in range(_STEPS):
                await asyncio.sleep(_STEP_S)
            self.leap(seconds)
        return await asking
