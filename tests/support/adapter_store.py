"""Adapter stores as gateways run them, and records and versions to fill them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from adapters.errors import UnknownAdapter
from adapters.record import Record, Version
from adapters.registry import Registry
from lora_store.disk import Disk
from lora_store.redis import RedisSettings, RedisTier
from lora_store.tiered import TieredStore
from tests.support.lora_files import content
from tests.support.redis_server import RedisServer

NEVER_S = 3600.0
"""A `poll_s` so long that the store sees changes only through Redis notifications."""


def record(name: str = "zh", number: int = 1) -> Record:
    """Return the first record of a name, whose only version is `content(number)`."""
    version = Version.of(content(number), "demo", 1.0, "test", number)
    return Record(
        name=name, life=1, revision=1, updated=1.0, served=version.digest, versions=(version,)
    )


def version_file(root: Path, digest: str) -> Path:
    """Return the path of a version in a `Disk` in the folder `root`."""
    return root / "versions" / digest[:2] / f"{digest}.lora"


def overwrite(path: Path) -> None:
    """Corrupt the weights in a version's file, in place and with the same size."""
    with path.open("r+b") as file:
        file.seek(-1024, os.SEEK_END)
        weights = file.read()
        file.seek(-1024, os.SEEK_END)
        file.write(bytes(byte ^ 0x55 for byte in weights))


def copies(root: Path) -> set[str]:
    """Return the digests of the versions that a `Disk` in the folder `root` stores."""
    return {path.stem for path in (root / "versions").rglob("*.lora")}


class StoreGateway:
    """A store and the registry over it, as in one gateway process."""

    def __init__(self, store: TieredStore) -> None:
        self.store = store
        self.registry = Registry(store)
        store.on_change = self.registry.refresh

    async def add(self, name: str, number: int) -> None:
        """Make `content(number)` the version that `name` serves."""
        await self.registry.add(name, "demo", content(number), "test")

    def serves(self, name: str) -> str | None:
        """Return the digest that this store serves under the name, or None."""
        try:
            return self.registry.snapshot.resolve(name).digest
        except UnknownAdapter:
            return None

    async def holds(self, number: int) -> bool:
        found = await self.store.get(content(number).digest)
        return bytes(found.weights) == bytes(content(number).weights)


@contextlib.asynccontextmanager
async def store_gateway(
    root: Path,
    redis: RedisSettings | None,
    *,
    memory_bytes: int = 2**20,
    poll_s: float = 0.2,
) -> AsyncIterator[StoreGateway]:
    """Run a store in the folder `root` that shares its versions through `redis`."""
    tier = None if redis is None else RedisTier(redis)
    async with TieredStore(Disk(root), tier, memory_bytes=memory_bytes, poll_s=poll_s) as store:
        gateway = StoreGateway(store)
        await gateway.registry.load()
        yield gateway


async def becomes(condition: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait for the condition. The time limit only ends a test that hangs."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        await asyncio.sleep(0.01)


def gateway(
    root: Path, server: RedisServer | None, **options: Any
) -> contextlib.AbstractAsyncContextManager[StoreGateway]:
    return store_gateway(root, None if server is None else server.settings(), **options)


async def listening(server: RedisServer, count: int) -> None:
    """Wait until `count` gateways are subscribed to change notifications."""
    with server.client() as client:
        await becomes(lambda: client.pubsub_numsub("lora:changes") == [(b"lora:changes", count)])
