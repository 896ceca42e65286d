"""Server-sent events with the console's data, for the browsers that show the console ("readers").

A snapshot is the complete data of the gateway at one moment. Each reader first receives a snapshot,
then only what has changed. A change is relative to the snapshot that the same reader received last,
so a slow reader does not delay other readers.

See decision 008 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import orjson

from gateway.console.patch import difference
from gateway.console.shared import SharedResult

_MAX_CACHED_CHANGES = 4


class StateSnapshot:
    """Data of the gateway at one moment. `state` is the data, and `text` is `state` as JSON."""

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
    """Source of server-sent events for all browsers. Use an instance on one event loop only.

    `make` returns the gateway's current data, from which snapshots and changes are built.
    """

    def __init__(self, make: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._make = make
        self._number = int(time.time())
        self._latest = SharedResult(self._make_snapshot)
        self._changes: dict[tuple[int, int], bytes] = {}

    async def latest(self) -> StateSnapshot:
        return await self._latest.get()

    async def follow(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events for one reader: first a snapshot, then changes.

        The caller must request the next event only after the last event was sent. A slow reader
        then gets fewer and larger changes.
        """
        shown = await self.latest()
        yield _frame_event("state", shown.number, shown.text)
        while True:
            await asyncio.sleep(max(0.0, self._latest.fresh_until - time.monotonic()))
            before, shown = shown, await self.latest()
            if shown is not before:
                yield _frame_event("change", shown.number, self._build_change(before, shown))

    async def _make_snapshot(self) -> StateSnapshot:
        self._number += 1
        return StateSnapshot(self._number, await self._make())

    def _build_change(self, before: StateSnapshot, after: StateSnapshot) -> bytes:
        """Return the difference between two snapshots as a JSON merge patch.

        The last few patches are cached, so that readers with the same snapshots share one patch.
        """
        key = before.number, after.number
        change = self._changes.get(key)
        if change is None:
            change = self._changes[key] = orjson.dumps(difference(before.state, after.state))
            while len(self._changes) > _MAX_CACHED_CHANGES:
                del self._changes[next(iter(self._changes))]
        return change


def _frame_event(name: str, number: int, data: bytes) -> bytes:
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (number, name.encode(), data)
