"""Reading, writing and copying of adapter versions between memory, disk and Redis.

A version is one immutable set of an adapter's weights. `TieredStore` uses this module.
"""

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
from lora_store.memory import MemoryTier
from lora_store.redis import RedisTier
from lora_store.stats import StoreStats

_LOG = logging.getLogger(__name__)

# Maximum time to wait for a version that is missing in Redis and on this disk. During this time,
# another gateway that has the version can store it in Redis.
_REFILL_TIMEOUT_S = 5.0
_REFILL_POLL_S = 0.05
# Interval at which the request to store the version in Redis is repeated. A gateway that has the
# version may not have been connected to Redis at the first request.
_WANT_INTERVAL_S = 0.5
# Maximum number of versions that are read from disk at the same time. One read may take half a
# second of CPU. `Link` has more threads, so reads of records need not wait for reads of versions.
_MAX_DISK_READS = 2
_MAX_LOGGED_VERSIONS = 3  # maximum number of digests in a log line


class Versions:
    """The adapter versions of one store, in memory, on disk and in Redis."""

    def __init__(self, disk: Disk, link: Link, memory: MemoryTier, stats: StoreStats) -> None:
        self._disk = disk
        self._link = link
        self._memory = memory
        self._stats = stats
        self._flights: dict[str, asyncio.Task[Converted]] = {}
        # Digests of the versions that are being loaded and will be stored in memory.
        self._for_memory: set[str] = set()
        self._unsent: set[str] = set()
        self._reading = asyncio.Semaphore(_MAX_DISK_READS)

    async def get(self, digest: str) -> Converted:
        """Return an adapter version from memory, disk or Redis. Concurrent callers share one read.

        If the version is in memory but its file on disk has changed, the file is read and verified
        at once. If the file is damaged, it is written again from memory or Redis.
        """
        stored = self._memory.get(digest)
        if stored is not None and not await self._link.run(partial(self._disk.has_changed, digest)):
            self._stats.memory_hits += 1
            return stored
        self._stats.memory_misses += 1
        return await self._load_shared(digest, keep=True)

    async def put(self, converted: Converted) -> None:
        """Store an adapter version on disk and in Redis. If Redis is down, send it there later."""
        digest = converted.digest
        await self._link.run(partial(self._disk.put, converted))
        stored = await self._from_disk(digest)
        if stored is None:
            raise VersionUnavailable(digest, "the copy just written cannot be read back")
        self._store_in_memory(stored)
        if not self._link.is_configured:
            return
        try:
            await self._link.call(lambda redis: redis.put(stored))
        except StoreError as error:
            self._mark_unsent([digest], error)

    async def verify(self, digest: str) -> None:
        """Verify every byte of an adapter version's file on this disk.

        Repair a damaged file from memory or Redis. Raise an error if it cannot be repaired.
        """
        await self._load_shared(digest, keep=True)

    async def copy_to_disk(self, digests: Iterable[str]) -> bool:
        """Copy the adapter versions in `digests` that this disk lacks to this disk.

        Return True if this disk now has all versions in `digests`.
        """
        complete = True
        for digest in await self._link.run(partial(self._disk.find_missing, digests)):
            try:
                await self._load_shared(digest, keep=False)
            except StoreError as error:
                complete = False
                _LOG.warning("not on this disk yet: %s", error)
        return complete

    async def send_missing(self, digests: Iterable[str]) -> None:
        """Send adapter versions to Redis, unless Redis already has them.

        These are the versions in `digests`, and all versions that earlier could not be sent.

        If Redis refuses writes, the remaining versions are sent later. If Redis has no more free
        memory, each remaining version is sent only when a gateway requests it, because Redis would
        otherwise remove other versions. Raise `StoreUnavailable` if Redis becomes unavailable.
        """
        candidates = sorted({*digests, *self._unsent})
        present = await self._link.call(lambda redis: redis.has(candidates))
        self._mark_sent(present)
        missing = [digest for digest in candidates if digest not in present]
        room = await self._link.call(RedisTier.free_bytes) if missing else None
        left = math.inf if room is None else room
        for index, digest in enumerate(missing):
            left -= 0 if room is None else await self._link.run(partial(self._disk.nbytes, digest))
            if left < 0:
                return
            try:
                await self._send(digest)
            except WritesRefused as error:
                self._mark_unsent(missing[index:], error)
                return

    async def send_if_stored(self, digest: str) -> None:
        """Send to Redis an adapter version that another gateway has requested.

        Do nothing if this disk lacks the version. Also do nothing if Redis already has the version:
        gateways repeat a request until they find the version in Redis.
        """
        if not await self._link.call(lambda redis: redis.has([digest])):
            await self._send(digest)

    def is_unsent(self, digest: str) -> bool:
        """Return True if this version could not be sent to Redis yet."""
        return digest in self._unsent

    async def close(self) -> None:
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    def _store_in_memory(self, converted: Converted) -> None:
        self._memory.put(converted)
        self._stats.memory_bytes = self._memory.nbytes

    async def _load_shared(self, digest: str, *, keep: bool) -> Converted:
        """Load a version from the disk or Redis, and return it. Concurrent callers share one load.

        If `keep` is True, the version is also stored in memory. This happens even if the caller is
        cancelled, so that the time for loading the version was not wasted.
        """
        flight = self._flights.get(digest)
        if flight is None:
            flight = asyncio.create_task(self._load(digest))
            self._flights[digest] = flight
            flight.add_done_callback(lambda done: self._finish_flight(digest, done))
        if keep:
            self._for_memory.add(digest)
        # Shield the task: the cancellation of one caller must not cancel the load for other
        # callers.
        return await asyncio.shield(flight)

    def _finish_flight(self, digest: str, flight: asyncio.Task[Converted]) -> None:
        del self._flights[digest]
        keep = digest in self._for_memory
        self._for_memory.discard(digest)
        # Retrieve the exception, even if all callers were cancelled: otherwise asyncio would log
        # it.
        if not flight.cancelled() and flight.exception() is None and keep:
            self._store_in_memory(flight.result())

    async def _load(self, digest: str) -> Converted:
        found = await self._from_disk(digest)
        if found is not None:
            self._stats.disk_hits += 1
            return found
        self._stats.disk_misses += 1
        stored = self._memory.get(digest)
        if stored is not None:
            await self._restore(stored)
            return stored
        if not self._link.is_configured:
            raise VersionUnavailable(digest, "no intact copy on disk")
        found = await self._from_redis(digest)
        if found is not None:
            self._stats.redis_hits += 1
            return found
        self._stats.redis_misses += 1
        loop = asyncio.get_running_loop()
        next_want = loop.time()
        deadline = next_want + _REFILL_TIMEOUT_S
        while found is None:
            if loop.time() > deadline:
                raise VersionUnavailable(digest, "no intact copy on disk or in Redis")
            if loop.time() >= next_want:
                await self._link.call(partial(RedisTier.want, digest=digest))
                next_want = loop.time() + _WANT_INTERVAL_S
            await asyncio.sleep(_REFILL_POLL_S)
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

    async def _restore(self, stored: Converted) -> None:
        try:
            await self._link.run(partial(self._disk.put, stored))
        except StoreError as error:
            _LOG.error("copy of %s on disk cannot be mended: %s", stored.digest[:12], error)

    async def _from_redis(self, digest: str) -> Converted | None:
        """Copy a version from Redis to the disk, and return the version.

        Return None if Redis has no intact copy. A damaged copy in Redis is deleted.
        """
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
            # The disk cannot store the version, for example because it is full. Requests must
            # succeed nevertheless, so read the version from Redis again, and return it.
            _LOG.error("cannot keep %s on disk: %s", digest[:12], error)
            again = redis.fetch(digest)
            return None if again is None else decode(b"".join(again), digest)
        return self._disk.get(digest)

    async def _send(self, digest: str) -> None:
        """Send a version from this disk to Redis, unless another gateway is just sending it.

        Raises:
            StoreUnavailable: Redis is down.
            WritesRefused: Redis refuses writes. The first write is the claim (`RedisTier.claim`).
                If Redis refuses the claim, the version is not read from the disk.
        """
        try:
            # Do not claim a version that is not on this disk: the claim would prevent gateways that
            # have the version from sending it.
            if not await self._link.run(partial(self._disk.has, digest)):
                return
            if await self._link.call(lambda redis: redis.claim(digest)):
                converted = await self._from_disk(digest)
                if converted is not None:
                    await self._link.call(lambda redis: redis.put(converted))
                    self._stats.refilled += 1
                await self._link.call(lambda redis: redis.release(digest))
                if converted is None:
                    return
        except (StoreUnavailable, WritesRefused):
            raise
        except StoreError as error:
            self._mark_unsent([digest], error)
            return
        self._mark_sent({digest})

    def _mark_unsent(self, digests: Sequence[str], error: StoreError) -> None:
        """Record and log versions that must be sent to Redis later."""
        some = ", ".join(digest[:12] for digest in digests[:_MAX_LOGGED_VERSIONS])
        more = (
            f" and {len(digests) - _MAX_LOGGED_VERSIONS} more"
            if len(digests) > _MAX_LOGGED_VERSIONS
            else ""
        )
        _LOG.warning("Redis gets %s%s later: %s", some, more, error)
        self._unsent.update(digests)
        self._stats.unsent = len(self._unsent)

    def _mark_sent(self, digests: set[str]) -> None:
        self._unsent -= digests
        self._stats.unsent = len(self._unsent)
