"""The state as readers follow it: whole at first, then what has changed for each of them.

A reader that is slow is sent the changes since what it was last sent, whatever came between, so
nothing waits for it but that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import orjson

from gateway.console.patch import difference
from gateway.console.shared import Shared

_KEPT_CHANGES = 4


class Shown:
    """A state at one moment."""

    def __init__(self, number: int, state: dict[str, Any]) -> None:
        self.number = number
        self.state = state
        self._text: bytes | None = None

    @property
    def text(self) -> bytes:
        if self._text is None:
            self._text = orjson.dumps(self.state)
        return self._text


class Feed:
    """`make` gives the state now. Belongs to one event loop."""

    def __init__(self, make: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._make = make
        self._number = int(time.time())
        self._latest = Shared(self._next)
        self._changes: dict[tuple[int, int], bytes] = {}

    async def latest(self) -> Shown:
        return await self._latest.get()

    async def follow(self) -> AsyncGenerator[bytes]:
        """Events of a stream, each whole; the next one is asked for when that is sent."""
        shown = await self.latest()
        yield _event("state", shown.number, shown.text)
        while True:
            await asyncio.sleep(max(0.0, self._latest.until - time.monotonic()))
            before, shown = shown, await self.latest()
            if shown is not before:
                yield _event("change", shown.number, self._change(before, shown))

    async def _next(self) -> Shown:
        self._number += 1
        return Shown(self._number, await self._make())

    def _change(self, before: Shown, after: Shown) -> bytes:
        """Readers that keep up are all sent the same."""
        key = before.number, after.number
        change = self._changes.get(key)
        if change is None:
            change = self._changes[key] = orjson.dumps(difference(before.state, after.state))
            while len(self._changes) > _KEPT_CHANGES:
                del self._changes[next(iter(self._changes))]
        return change


def _event(name: str, number: int, data: bytes) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, name.encode(), data)
