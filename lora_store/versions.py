"""Converted adapters through the tiers: memory, disk, Redis."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Sequence
from functools import partial

from adapters.adapter import Converted
from adapters.errors import StoreError, StoreUnavailable, VersionUnavailable, WritesRefused
from lora_store.codec import CorruptBlob, decode
from lora_store.disk import Disk
from lora_store.link import Link
from lora_store.memory import Memory
from lora_store.redis import RedisTier
from lora_store.stats import Stats

_LOG = logging.getLogger(__name__)

# How long another gateway may take to put a version that Redis lost.
_WANTED_S = 3.0
_WANTED_POLL_S = 0.05
# Versions read from the disk at once: each may be half a second of CPU. `Link` has more threads for
# the disk, for records.
_READS = 2
_NAMED = 3  # versions in one line of the log


class Versions:
    def __init__(self, disk: Disk, link: Link, memory: Memory, stats: Stats) -> None:
        self._disk = disk
        self._link = link
        self._memory = memory
        self._stats = stats
        self._flights: dict[str, asyncio.Task[Converted]] = {}
        # Of those, what is to be in memory afterwards.
        self._to_keep: set[str] = set()
        self._unsent: set[str] = set()
        self._reading = asyncio.Semaphore(_READS)

    async def get(self, digest: str) -> Converted:
        """From the first tier that has it. All who ask meanwhile share one read.

        What memory has is right whatever became of its file; but one that was written to is looked
        at now, while there is something to mend it from.
        """
        kept = self._memory.get(digest)
        if kept is not None and not await self._link.run(partial(self._disk.changed, digest)):
            self._stats.memory_hits += 1
            return kept
        self._stats.memory_misses += 1
        return await self._shared(digest, keep=True)

    async def put(self, converted: Converted) -> None:
        """On disk when this returns; in Redis too, or as soon as it is back."""
        digest = converted.digest
        await self._link.run(partial(self._disk.put, converted))
        kept = await self._from_disk(digest)
        if kept is None:
            raise VersionUnavailable(digest, "the copy just written cannot be read back")
        self._keep(kept)
        if not self._link.configured:
            return
        try:
            await self._link.call(lambda redis: redis.put(kept))
        except StoreError as error:
            self._later([digest], error)

    async def verify(self, digest: str) -> None:
        """Read all of the copy on this disk again; a damaged one is replaced or reported."""
        await self._shared(digest, keep=True)

    async def bring_here(self, digests: Iterable[str]) -> bool:
        """Copy to this disk what it lacks of these versions; True when none is left."""
        complete = True
        for digest in await self._link.run(partial(self._disk.missing, digests)):
            try:
                await self._shared(digest, keep=False)
            except StoreError as error:
                complete = False
                _LOG.warning("not on this disk yet: %s", error)
        return complete

    async def send_missing(self, digests: Iterable[str]) -> None:
        """Put what Redis lacks of these versions and of those that it did not get before.

        A Redis that takes no writes gets the others later. One that would drop versions for more of
        them gets those that are asked for.

        Raises `StoreUnavailable` when Redis goes away meanwhile.
        """
        candidates = sorted({*digests, *self._unsent})
        present = await self._link.call(lambda redis: redis.has(candidates))
        self._sent(present)
        missing = [digest for digest in candidates if digest not in present]
        room = await self._link.call(RedisTier.room) if missing else None
        left = math.inf if room is None else room
        for place, digest in enumerate(missing):
            left -= 0 if room is None else await self._link.run(partial(self._disk.nbytes, digest))
            if left < 0:
                return
            try:
                await self._send(digest)
            except WritesRefused as error:
                self._later(missing[place:], error)
                return

    async def send_wanted(self, digest: str) -> None:
        """Another gateway asked for this version."""
        if await self._link.run(partial(self._disk.has, digest)):
            await self._send(digest)

    def is_unsent(self, digest: str) -> bool:
        """Return True if Redis is still to be given this version."""
        return digest in self._unsent

    async def close(self) -> None:
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    def _keep(self, converted: Converted) -> None:
        self._memory.put(converted)
        self._stats.memory_bytes = self._memory.nbytes

    async def _shared(self, digest: str, *, keep: bool) -> Converted:
        """`keep` puts it into memory, also when whoever asked has gone: it has cost its time."""
        flight = self._flights.get(digest)
        if flight is None:
            flight = asyncio.create_task(self._load(digest))
            self._flights[digest] = flight
            flight.add_done_callback(lambda done: self._landed(digest, done))
        if keep:
            self._to_keep.add(digest)
        # Whoever stops waiting must not stop it for the others.
        return await asyncio.shield(flight)

    def _landed(self, digest: str, flight: asyncio.Task[Converted]) -> None:
        del self._flights[digest]
        keep = digest in self._to_keep
        self._to_keep.discard(digest)
        # To ask for the exception marks it as seen: all who waited may have gone.
        if not flight.cancelled() and flight.exception() is None and keep:
            self._keep(flight.result())

    async def _load(self, digest: str) -> Converted:
        found = await self._from_disk(digest)
        if found is not None:
            self._stats.disk_hits += 1
            return found
        self._stats.disk_misses += 1
        kept = self._memory.get(digest)
        if kept is not None:
            await self._restore(kept)
            return kept
        if not self._link.configured:
            raise VersionUnavailable(digest, "no intact copy on disk")
        found = await self._from_redis(digest)
        if found is not None:
            self._stats.redis_hits += 1
            return found
        self._stats.redis_misses += 1
        await self._link.call(partial(RedisTier.want, digest=digest))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _WANTED_S
        while found is None:
            if loop.time() > deadline:
                raise VersionUnavailable(digest, "no intact copy on disk or in Redis")
            await asyncio.sleep(_WANTED_POLL_S)
            found = await self._from_redis(digest)
        self._stats.redis_hits += 1
        return found

    async def _from_disk(self, digest: str) -> Converted | None:
        try:
            async with self._reading:
                return await self._link.run(partial(self._disk.get, digest))
        except CorruptBlob as error:
            self._stats.corrupt_copies += 1
            _LOG.error("copy of %s on disk moved to quarantine: %s", digest[:12], error)
        except StoreError as error:
            _LOG.error("copy of %s on disk cannot be read: %s", digest[:12], error)
        return None

    async def _restore(self, kept: Converted) -> None:
        try:
            await self._link.run(partial(self._disk.put, kept))
        except StoreError as error:
            _LOG.error("copy of %s on disk cannot be mended: %s", kept.digest[:12], error)

    async def _from_redis(self, digest: str) -> Converted | None:
        """Fetch to the disk. None when Redis has no intact copy; a bad one is deleted."""
        try:
            return await self._link.call(lambda redis: self._receive(redis, digest))
        except CorruptBlob as error:
            self._stats.corrupt_copies += 1
            _LOG.error("copy of %s in Redis deleted: %s", digest[:12], error)
            await self._link.call(partial(RedisTier.delete, digest=digest))
        except StoreUnavailable as error:
            reason = f"adapter version {digest[:12]} is not on disk, and {error}"
            raise StoreUnavailable(reason) from error
        except StoreError as error:
            _LOG.warning("cannot fetch %s: %s", digest[:12], error)
        return None

    def _receive(self, redis: RedisTier, digest: str) -> Converted | None:
        chunks = redis.fetch(digest)
        if chunks is None:
            return None
        try:
            self._disk.receive(digest, chunks)
        except OSError as error:
            # A full disk must not stop the service: this copy lives in memory alone.
            _LOG.error("cannot keep %s on disk: %s", digest[:12], error)
            again = redis.fetch(digest)
            return None if again is None else decode(b"".join(again), digest)
        return self._disk.get(digest)

    async def _send(self, digest: str) -> None:
        """Put a version from this disk, unless another gateway is doing so.

        Raises `StoreUnavailable`, and `WritesRefused` before the version is read.
        """
        try:
            if await self._link.call(lambda redis: redis.claim(digest)):
                converted = await self._from_disk(digest)
                if converted is None:
                    return
                await self._link.call(lambda redis: redis.put(converted))
                await self._link.call(lambda redis: redis.release(digest))
                self._stats.refilled += 1
        except (StoreUnavailable, WritesRefused):
            raise
        except StoreError as error:
            self._later([digest], error)
            return
        self._sent({digest})

    def _later(self, digests: Sequence[str], error: StoreError) -> None:
        """Note versions that Redis is to be given, and does not take now."""
        some = ", ".join(digest[:12] for digest in digests[:_NAMED])
        more = f" and {len(digests) - _NAMED} more" if len(digests) > _NAMED else ""
        _LOG.warning("Redis gets %s%s later: %s", some, more, error)
        self._unsent.update(digests)
        self._stats.unsent = len(self._unsent)

    def _sent(self, digests: set[str]) -> None:
        self._unsent -= digests
        self._stats.unsent = len(self._unsent)
