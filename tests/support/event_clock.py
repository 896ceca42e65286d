"""The event loop's clock, which a test advances instead of waiting.

A deadline short enough to wait for would be missed on a busy machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Several steps, so that a process that got no CPU time catches up.
_STEPS, _STEP_S = 40, 0.005


class EventClock:
    """The clock of the running event loop. Create it before the loop is asked for its time."""

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
        """Stop the clock: no deadline expires, however long a busy machine takes for the body.

        No sleep ends either, except for 0 s.
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
        """Return the result of `asked`, after a leap of `seconds` once `happened` is true.

        If that never becomes true, `asked` ends by itself.
        """
        asking = asyncio.ensure_future(asked)
        while not asking.done() and not happened():
            await asyncio.sleep(_STEP_S)
        if not asking.done():
            for _ in range(_STEPS):
                await asyncio.sleep(_STEP_S)
            self.leap(seconds)
        return await asking
