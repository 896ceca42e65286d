"""Deletion of versions that no record names any more, on disk and in Redis."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from lora_store.disk import Disk
from lora_store.link import Link
from lora_store.memory import MemoryTier
from lora_store.redis import RedisTier


class VersionCollector:
    """Deletes unnamed versions after a grace time, counted from the last put and from the last
    name.

    Until then, a request that resolved the version may still be queued, and read it.
    """

    def __init__(self, disk: Disk, link: Link, memory: MemoryTier) -> None:
        self._disk = disk
        self._link = link
        self._memory = memory
        # Time at which each was first found without a name, by the monotonic clock.
        self._unnamed: dict[str, float] = {}

    async def collect(self, in_use: Callable[[], set[str]], grace_s: float) -> None:
        """Delete versions that are outside `in_use()`, the versions that records name.

        `in_use` is called again before each deletion, since the version may have been added again.
        Do nothing while a record is in quarantine: its versions may still be in use.
        """
        if await self._link.run(self._disk.has_bad_records):
            return
        here = await self._link.run(partial(self._disk.digests, grace_s))
        shared: set[str] = set()
        if self._link.redis is not None:
            shared = await self._link.call(lambda redis: redis.digests(grace_s))
        now = time.monotonic()
        self._unnamed = {
            digest: self._unnamed.get(digest, now) for digest in (here | shared) - in_use()
        }
        for digest, since in self._unnamed.items():
            if now - since < grace_s or digest in in_use():
                continue
            if digest in here and await self._link.run(
                partial(self._disk.delete, digest, older_than_s=grace_s)
            ):
                self._memory.drop(digest)
            if digest in shared:
                delete = partial(RedisTier.delete, digest=digest, older_than_s=grace_s)
                await self._link.call(delete)
