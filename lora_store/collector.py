"""Garbage collection of unused adapter versions on disk and in Redis.

A record lists the versions of an adapter name that requests may use. A version is unused if no
record lists it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from lora_store.disk import Disk
from lora_store.link import Link
from lora_store.memory import MemoryTier
from lora_store.redis import RedisTier


class VersionCollector:
    """Garbage collector of adapter versions that no adapter record lists.

    A version is deleted only after a grace time. During this time, a queued request that has
    already selected the version can still read it. The grace time starts anew when a record lists
    the version again, or when the version is stored again.
    """

    def __init__(self, disk: Disk, link: Link, memory: MemoryTier) -> None:
        self._disk = disk
        self._link = link
        self._memory = memory
        # For each version that no record lists, by digest: monotonic time of the first collection
        # that found this. The entry is removed when a record lists the version again.
        self._unnamed: dict[str, float] = {}

    async def collect(self, in_use: Callable[[], set[str]], grace_s: float) -> None:
        """Delete the versions that no record has listed for `grace_s` seconds.

        `in_use` returns the digests of all versions that records list. This function is called
        again before each deletion, because a record may have been added in the meantime. Nothing is
        deleted while an unreadable record file exists, because this record may list any version.
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
