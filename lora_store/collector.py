"""Garbage collection of adapter versions that no record refers to, on disk and in Redis."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from lora_store.disk import Disk
from lora_store.link import Link
from lora_store.memory import MemoryTier
from lora_store.redis import RedisTier


class VersionCollector:
    """Garbage collector of adapter versions that no record refers to.

    A version is deleted when the grace time has passed since its last put, and since a record last
    referred to it. During the grace time, a queued request that has already selected the version
    can still read it.
    """

    def __init__(self, disk: Disk, link: Link, memory: MemoryTier) -> None:
        self._disk = disk
        self._link = link
        self._memory = memory
        # Versions without a record, by digest: the monotonic time at which this was first found.
        self._unnamed: dict[str, float] = {}

    async def collect(self, in_use: Callable[[], set[str]], grace_s: float) -> None:
        """Delete the versions that no record has referred to for `grace_s` seconds.

        `in_use` returns the digests of all versions to which records refer. It is called again
        before each deletion, because a record may refer to the version again. While an unreadable
        record is in quarantine, nothing is deleted, because the record may refer to any version.
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
