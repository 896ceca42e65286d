"""The event loop's clock, which a test puts forward: what would take a minute has taken it.

A deadline that is short enough to wait for is one that a busy machine misses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

# In steps, in which a process that stood still for a while catches up.
_STEPS, _STEP_S = 40, 0.005


class EventClock:
    """Of the running event loop. Make it before anything asks that loop for its time."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        ahead_of, self._ahead = loop.time, 0.0
        loop.time = lambda: ahead_of() + self._ahead  # type: ignore[method-assign]

    def leap(self, seconds: float) -> None:
        self._ahead += seconds

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
