"""An event loop clock that a test advances instead of waiting.

A real deadline that is short enough for a test would be missed on a busy machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

# The clock advances in several steps, so that a process without CPU time catches up.
_STEPS, _STEP_S = 40, 0.005


class EventClock:
    """The clock of the running event loop. Create it before the loop's time is first read."""

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
        """Stop the clock, so that no deadline expires however slow the machine runs the body.

        No sleep ends either, except one of 0 s.
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
        """Return the result of `asked`. Advance the clock by `seconds` once `happened` returns
        True.

        If `happened` never does, no time is skipped, and `asked` must end by itself.
        """
        asking = asyncio.ensure_future(asked)
        while not asking.done() and not happened():
            await asyncio.sleep(_STEP_S)
        if not asking.done():
            for _ in range(_STEPS):
                await asyncio.sleep(_STEP_S)
            self.leap(seconds)
        return await asking
