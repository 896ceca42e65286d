"""Deletes versions that no record names any more, here and in Redis."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from lora_store.disk import Disk
from lora_store.link import Link
from lora_store.memory import Memory
from lora_store.redis import RedisTier


class Collector:
    """Each version stays for a while after its last put, and for as long after its last name went:
    what was asked of it by then may still wait for its turn, and read it."""

    def __init__(self, disk: Disk, link: Link, memory: Memory) -> None:
        self._disk = disk
        self._link = link
        self._memory = memory
        # When each was first found without a name, by the monotonic clock.
        self._unnamed: dict[str, float] = {}

    async def collect(self, in_use: Callable[[], set[str]], grace_s: float) -> None:
        """`in_use()` are those that records name. It is asked again for each that is to go, as it
        may have been added anew meanwhile.

        Does nothing while a record is in quarantine: its versions may still be in use.
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
