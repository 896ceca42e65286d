"""Running conversation stores, one per gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from gateway.conversations.store import Conversations

TENANT_BYTES = 8 * 1024 * 1024
GATEWAYS = "conversations:{all}:gateways"
"""Redis hash of all registered gateways."""


@contextlib.asynccontextmanager
async def following(folder: Path, url: str | None, **more: Any) -> AsyncIterator[Conversations]:
    """Run a store that synchronizes its disk and Redis while the context is open."""
    bounds = {"ttl_s": 10**6, "tenant_bytes": TENANT_BYTES}
    async with Conversations(folder, url, **bounds, **more) as store:
        task = asyncio.create_task(store.follow())
        try:
            yield store
        finally:
            task.cancel()
            await asyncio.wait([task])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.02)
