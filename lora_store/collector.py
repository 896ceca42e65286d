"""Garbage collection of adapter versions on disk and in Redis to which no record refers.

A record lists the versions of an adapter name that requests may use.
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
    """Garbage collector of adapter versions to which no record refers.

    A version is deleted after a grace time in which no record has referred to it and it was not
    stored again. A queued request that has already selected the version can still read it during
    this time.
    """

    def __init__(self, disk: Disk, link: Link, memory: MemoryTier) -> None:
        self._disk = disk
        self._link = link
        self._memory = memory
        # Monotonic time at which the collector first found that no record refers to a version, by
        # the version's digest.
        self._unnamed: dict[str, float] = {}

    async def collect(self, in_use: Callable[[], set[str]], grace_s: float) -> None:
        """Delete the versions that no record has referred to for `grace_s` seconds.

        `in_use` returns the digests of all versions to which records refer. It is called again
        before each deletion, because a new record may refer to the version by then. While an
        unreadable record file is in quarantine, delete nothing: this record may refer to any
        version.
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
