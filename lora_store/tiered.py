"""Adapter store that combines memory, disk and Redis: `TieredStore`.

*Versions.* A version is one immutable set of an adapter's weights. `put` writes a version to the
disk, then to Redis. If Redis is down, the version is sent to Redis later. `get` searches memory,
disk and Redis in this order. Concurrent callers of `get` share one read. Each version is verified
after it was read into memory. A damaged file on disk is moved to quarantine, and replaced by a copy
from memory or Redis. If Redis lacks a version, the store publishes a request for it through Redis.
A gateway that has the version answers the request by storing the version in Redis. Every store
copies all versions that records list to its own disk. No version is therefore lost if Redis loses
all its data.

*Records.* A record lists the versions of one adapter name. The disk and Redis each have a copy of
every record. `adapters.record.merge` merges copies that differ. Even if one copy is old, no added
version is lost and no removed version comes back. To change a record, the store takes the folder's
lock, performs a compare-and-set in Redis, and writes the record to the disk. The change succeeds if
Redis has stored the record, even if the disk cannot store it. Without Redis, or if the answer of
Redis is lost, the change succeeds if the disk has stored the record.

*Merging.* All records are merged at start, after a reconnect to Redis, and after a notice that
another gateway has changed a record. The store also polls Redis and the folder every `poll_s`
seconds, and merges the records if any has changed. A lost notice therefore only delays the merge.
While the disk cannot store all records, they are merged at each poll.

See decision 026 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any

from adapters.adapter import Converted
from adapters.errors import ChangeUnknown, StoreError
from adapters.record import Record, is_digest, merge
from adapters.registry import Change
from lora_store import names
from lora_store.collector import VersionCollector
from lora_store.disk import Disk
from lora_store.link import Link
from lora_store.memory import MemoryTier
from lora_store.redis import Position, RedisTier
from lora_store.refusals import RefusedValues
from lora_store.stats import StoreStats
from lora_store.versions import Versions

_LOG = logging.getLogger(__name__)

_RELISTEN_S = 0.2
_RETRY_S = 10.0
_COLLECT_S = 600.0
_GRACE_S = 3600.0
# Age, in nanoseconds, from which the folder's mtime is reliable. mtimes are coarse: two changes in
# quick succession may result in the same mtime. While the mtime is younger than this age, the store
# therefore reads all records at each poll.
_SETTLED_NS = 1_000_000_000
# Maximum number of queued versions that other gateways have requested. Further requests are
# dropped, because gateways repeat their requests.
_MAX_WANTED_VERSIONS = 1024


class TieredStore:
    """The adapter store of one process. Use it as an async context manager.

    `stats` has the store's statistics for metrics. If the callback `on_change` is set, the event
    loop calls it after each change of a record. Its argument has all records.
    """

    def __init__(
        self,
        disk: Disk,
        redis: RedisTier | None,
        *,
        memory_bytes: int,
        poll_s: float = 0.5,
    ) -> None:
        self.stats = StoreStats()
        self.on_change: Callable[[Mapping[str, Record]], None] | None = None
        self._disk = disk
        self._redis = redis
        self._link = Link(redis, self.stats)
        memory = MemoryTier(memory_bytes)
        self._versions = Versions(disk, self._link, memory, self.stats)
        self._collector = VersionCollector(disk, self._link, memory)
        self._poll_s = poll_s
        self._records: dict[str, Record] = {}
        self._seen_redis: Position | None = None
        self._seen_disk: tuple[int, int, int] | None = None
        self._writing = asyncio.Lock()
        self._nudge = asyncio.Event()
        self._upkeep_due = asyncio.Event()
        self._unwritten: Mapping[str, OSError] = {}
        # Names of records whose last change Redis may not have.
        self._unshared: set[str] = set()
        # After Redis has refused writes: monotonic time of the next attempt to write the records in
        # `_unshared` to Redis.
        self._share_due = math.inf
        self._redis_started_over = False
        # True if `_records` has all records of disk and Redis, and none of them is unreadable.
        self._knows_all = False
        # Queue of the versions, by digest, that other gateways have requested. A version stays in
        # the queue until the attempt to send it to Redis has ended.
        self._wanted: dict[str, None] = {}
        self._wanted_changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> TieredStore:
        try:
            await self._poll()
        except BaseException:
            await self._link.close()
            raise
        self._start(self._run_polling())
        self._start(self._upkeep())
        if self._redis is not None:
            self._start(self._listen(self._redis))
            self._start(self._run_sending())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._versions.close()
        await self._link.close()

    async def get(self, digest: str) -> Converted:
        return await self._versions.get(digest)

    async def put(self, converted: Converted) -> None:
        await self._versions.put(converted)

    async def verify(self, digest: str) -> None:
        """Verify every byte of an adapter version on this disk.

        Repair a damaged copy from memory or Redis. Raise `VersionUnavailable` or `StoreUnavailable`
        if the copy cannot be repaired.
        """
        await self._versions.verify(digest)

    async def records(self) -> Mapping[str, Record]:
        return dict(self._records)

    async def change(self, name: str, change: Change) -> Record:
        async with self._writing:
            changed = await self._link.call_or_run(
                lambda redis: names.change(self._disk, redis, name, change, self._records.get(name))
            )
            if changed.redis_error is not None:
                self._link.record_failure(changed.redis_error)
                if changed.disk_error is not None:
                    raise ChangeUnknown(name, changed.disk_error)
            if changed.disk_error is not None:
                self._set_unwritten({**self._unwritten, name: changed.disk_error})
        if changed.shared:
            self._unshared.discard(name)
        elif self._redis is not None:
            self._unshared.add(name)
        self._merge({name: changed.record})
        return changed.record

    def is_shared(self, record: Record) -> bool | None:
        """Return True if Redis has the record and its versions, as far as this store knows.

        Return None if the store has no Redis.
        """
        if self._redis is None:
            return None
        is_sent = not any(self._versions.is_unsent(each.weights) for each in record.versions)
        return is_sent and record.name not in self._unshared

    @property
    def redis_failure(self) -> str:
        """Reason why Redis cannot be used; empty while Redis can be used."""
        return self._link.failure

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(_report)
        self._tasks.append(task)

    async def _run_polling(self) -> None:
        while True:
            await _wait(self._nudge, self._poll_s)
            self._nudge.clear()
            try:
                await self._poll()
            except StoreError as error:
                _LOG.error("records cannot be read: %s", error)

    async def _poll(self) -> None:
        """Check whether records have changed on disk or in Redis. If so, merge the copies."""
        was_up = self.stats.redis_up
        position = await self._link.probe(RedisTier.position)
        folder = await self._link.run(self._disk.names_changed)
        if self._redis is not None:
            self.stats.refused_values = self._redis.refusals.count
        reconnected = self.stats.redis_up and not was_up
        is_same = position == self._seen_redis and folder == self._seen_disk
        if is_same and not reconnected and time.monotonic() < self._share_due:
            return
        self._knows_all = False
        async with self._writing:
            synced = await self._link.call_or_run(
                lambda redis: names.sync(self._disk, redis, self._records)
            )
            self._set_unwritten(synced.unwritten)
            self._share_due = math.inf
            if synced.position is not None:
                self._unshared = synced.unshared
            if synced.refusal is not None:
                self._link.record_failure(synced.refusal)
                _LOG.warning("%d records in Redis are old: %s", len(self._unshared), synced.refusal)
                self._share_due = time.monotonic() + _RETRY_S
        self.stats.syncs += 1
        old_epoch = self._seen_redis[0] if self._seen_redis else None
        if reconnected or (synced.position and synced.position[0] != old_epoch):
            self._redis_started_over = True
        self._seen_redis = synced.position
        settled = time.time_ns() - folder[2] > _SETTLED_NS
        self._seen_disk = folder if settled and not self._unwritten else None
        self._merge(synced.records)
        self._knows_all = not synced.unreadable
        self._upkeep_due.set()

    def _merge(self, records: Mapping[str, Record]) -> None:
        """Merge `records` into `_records`. Call `on_change` if any record changed."""
        known = self._records
        joined = {
            name: merge(known[name], record) if name in known else record
            for name, record in records.items()
        }
        if any(known.get(name) != record for name, record in joined.items()):
            self._records = {**known, **joined}
            if self.on_change is not None:
                self.on_change(dict(self._records))

    async def _listen(self, redis: RedisTier) -> None:
        while True:
            with contextlib.suppress(StoreError):
                async with contextlib.aclosing(redis.listen()) as messages:
                    async for message in messages:
                        self._handle_message(message, redis.refusals)
            # Poll at once, to find out if Redis is down or only this connection has failed.
            self._nudge.set()
            await asyncio.sleep(_RELISTEN_S)

    def _handle_message(self, message: str, refusals: RefusedValues) -> None:
        word, _, digest = message.partition(" ")
        if word == "wanted":
            if not is_digest(digest):
                refusals.add("a notice", message)
            elif len(self._wanted) < _MAX_WANTED_VERSIONS:
                self._wanted.setdefault(digest)
                self._wanted_changed.set()
        else:
            self.stats.notices += 1
            self._nudge.set()

    async def _run_sending(self) -> None:
        # Send the versions in this separate task, because `_upkeep` may wait until another gateway
        # sends a version. If `_upkeep` also sent versions, two gateways could wait for each other.
        while True:
            await self._wanted_changed.wait()
            self._wanted_changed.clear()
            while self._wanted:
                digest = next(iter(self._wanted))
                try:
                    await self._versions.send_if_stored(digest)
                except StoreError as error:
                    _LOG.warning("cannot put what another gateway wants: %s", error)
                finally:
                    del self._wanted[digest]

    async def _upkeep(self) -> None:
        """Copy missing versions to the disk and to Redis. Delete versions that no record lists.

        Run until cancelled.
        """
        collected = time.monotonic()
        complete = True
        while True:
            await _wait(self._upkeep_due, _COLLECT_S if complete else _RETRY_S)
            self._upkeep_due.clear()
            try:
                complete = await self._copy_versions()
                # Delete nothing while a record is unreadable: a newer release may have written it,
                # and it may refer to any version.
                if self._knows_all and time.monotonic() - collected >= _COLLECT_S:
                    await self._collector.collect(self._find_in_use, _GRACE_S)
                    collected = time.monotonic()
            except StoreError as error:
                complete = False
                _LOG.warning("upkeep continues later: %s", error)

    async def _copy_versions(self) -> bool:
        """Copy to the disk and to Redis the adapter versions that each of them lacks.

        Return True if all versions were copied.
        """
        in_use = self._find_in_use()
        if self._redis_started_over or self.stats.unsent:
            await self._versions.send_missing(in_use if self._redis_started_over else ())
            self._redis_started_over = False
        # Do not try to store versions if the disk could not store all records.
        return (
            not self._unwritten
            and await self._versions.copy_to_disk(in_use)
            and not self.stats.unsent
        )

    def _set_unwritten(self, unwritten: Mapping[str, OSError]) -> None:
        if unwritten and not self._unwritten:
            reason = next(iter(unwritten.values())).strerror
            _LOG.error("changes are in force, but this disk does not keep them: %s", reason)
        elif self._unwritten and not unwritten:
            _LOG.info("this disk keeps all changes again")
        self._unwritten = unwritten
        self.stats.unwritten = len(unwritten)

    def _find_in_use(self) -> set[str]:
        return {v.weights for record in self._records.values() for v in record.versions}


async def _wait(event: asyncio.Event, seconds: float) -> None:
    # Do not use asyncio.wait_for: in Python 3.11, it can swallow a cancellation.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _LOG.critical("the adapter store's upkeep stopped", exc_info=task.exception())
