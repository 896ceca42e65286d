"""Background task of the conversation store that keeps the disk and Redis equal.

One worker of each gateway runs the task. If a record is only on this gateway's disk, the task
uploads the record to Redis. If another gateway has deleted a record, the task deletes the record
from the disk. The task also removes expired records.

When Redis has lost its data, a new epoch starts, and all gateways upload their records again. Each
gateway knows the names of all gateways, even after a restart. Until all of them have reported that
their uploads are complete, clients do not get "not found", because a gateway may still upload the
missing record.

An ephemeral gateway is a gateway whose disk is deleted when it ends. Before it ends, it uploads all
its records and sends a goodbye: a report after which other gateways do not wait for its uploads.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from gateway.conversations.disk import ConversationDisk, SavedState
from gateway.conversations.disk_thread import DiskThread, DiskUnavailable
from gateway.conversations.notices import Deletion
from gateway.conversations.record import DiskRecord, Record
from gateway.conversations.redis_threads import RedisDown, RedisThreads
from gateway.conversations.shared import (
    EPHEMERAL_PREFIX,
    PollResult,
    RedisState,
    SharedConversations,
)
from gateway.conversations.stats import ConversationStats
from gateway.errors import ConversationTooLarge
from lora_store.folder_lock import FolderLock

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 1.0
_PAUSE_S = 0.01
_BATCH_RECORDS = 64
_BATCH_BYTES = 4 * 1024 * 1024
# After an outage of Redis, records that were written during the last 60 polls (one per second) are
# uploaded again. Redis syncs its writes to disk only every second, so it may have lost the last
# ones.
_DOUBTFUL_POLLS = 60
_SAVE_INTERVAL_MS = 60_000
GOODBYE_TIMEOUT_S = 10.0
"""Maximum time in seconds for which an ephemeral gateway uploads records when it shuts down.

The operator must give the process a longer time to terminate, such as a longer
`terminationGracePeriodSeconds` in Kubernetes.
"""
GOODBYE_SEEN_TIMEOUT_S = 2.0
"""Maximum seconds for which an ephemeral gateway waits until other gateways have read its goodbye.

Gateways poll every second, unless they are busy or have crashed.
"""
_RETRY_INTERVAL_S = 0.2  # pause after a failure of Redis before the goodbye is sent again


class Upkeep:
    """Background task that synchronises the disk in one folder with Redis.

    Each worker of the gateway has an instance. Only the worker that holds the folder's lock uploads
    and removes records.
    """

    def __init__(
        self,
        folder: Path,
        disk: DiskThread,
        redis: RedisThreads | None,
        stats: ConversationStats,
        *,
        ephemeral: bool = False,
    ) -> None:
        """Create the task. `follow` runs it.

        Args:
            folder: The folder of the SQLite file.
            disk: The thread that uses the SQLite file.
            redis: The threads that call Redis; None for a store without Redis.
            stats: Statistics to update.
            ephemeral: True if the folder is deleted when the gateway ends.
        """
        self._lock = FolderLock(folder / "lock", mode=0o600)
        self._ephemeral = ephemeral
        self._workers_file = folder / "workers"
        self._worker_fd = -1  # descriptor of the file on which each worker holds a shared lock
        self._disk = disk
        self._redis = redis
        self._stats = stats
        # Use the same name in all workers of this gateway, because one worker may report new
        # records and another worker may upload them.
        name = f"{socket.gethostname()}:{folder.absolute()}"
        self._gateway = f"{EPHEMERAL_PREFIX}{name}" if ephemeral else name
        self._keys: deque[int] = deque(maxlen=_DOUBTFUL_POLLS)
        self._since = -1
        # After a failover of Redis, other workers may write to the old primary for up to `_stale_s`
        # seconds. Redis loses these writes, but the disk has marked the records as uploaded. The
        # latest records are therefore uploaded again after this time (at `_recheck_at`).
        self._stale_s = 0.0 if redis is None else redis.stale_s
        self._recheck_at = math.inf
        self._saved = RedisState()

    def close(self) -> None:
        self._lock.release()
        if self._worker_fd >= 0:
            os.close(self._worker_fd)

    async def poll_first(self) -> None:
        """Poll Redis, and report if this disk has records that Redis lacks.

        Call this before the first request is served.
        """
        if self._redis is not None:
            # Ignore an OSError, which means that the folder cannot be used. Without the folder,
            # there are no records to upload at the end, so the lock on the workers' file is not
            # needed.
            with contextlib.suppress(OSError):
                self._worker_fd = os.open(self._workers_file, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(self._worker_fd, fcntl.LOCK_SH)
            with contextlib.suppress(DiskUnavailable):
                last = await self._disk.run(ConversationDisk.load_state)
                epoch, since, seen, left, _, gateways = last
                self._redis.state = RedisState(epoch, since, seen, left, gateways=gateways)
            with contextlib.suppress(DiskUnavailable, RedisDown):
                await self._report(self._redis)

    async def report_refused(self) -> None:
        """Report to the other gateways that this disk has a new record that Redis lacks.

        The store calls this when Redis has failed to store a record. The report is written to
        Redis, which may be available again.
        """
        if self._redis is not None and self._redis.is_up:
            with contextlib.suppress(RedisDown):
                await self._redis.poll(self._gateway, "dirty")

    async def depart(self) -> None:
        """Upload all records and send a goodbye, if the disk is deleted when the gateway ends.

        The goodbye is a report after which other gateways do not wait for uploads of this gateway.
        Only the gateway's last running worker does this. Call the method when `follow` has ended
        and no more records are written.
        """
        self._lock.release()  # so that the gateway's last worker can take the lock
        # Upload the latest records again now, without waiting for `_stale_s` seconds. The worker
        # that held the lock may have ended before it could do so.
        self._stale_s = self._recheck_at = 0.0
        if self._ephemeral and self._redis is not None and self._is_last() and self._holds_lock():
            try:
                async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                    await self._send_goodbye(self._redis)
            except (DiskUnavailable, TimeoutError):
                log.warning(
                    "other gateways wait for what only this gateway stores: Redis lacks some"
                )
            else:
                log.info("no other gateway waits for what was stored here: Redis has it")

    async def _send_goodbye(self, redis: RedisThreads) -> None:
        """Upload all records and send a goodbye. Repeat both until Redis accepts the goodbye.

        Without a goodbye, reads of missing records would fail on other gateways for up to an hour,
        because this gateway might still upload the records.
        """
        while True:
            try:
                while await self._report(redis):
                    await self._upload(redis, in_haste=True)
                result = await redis.poll(self._gateway)
                reported = (result.state.epoch, result.dirty)
                goodbye = await redis.poll(self._gateway, "bye", reported)
                if goodbye.is_complete and await self._wait_until_seen(redis, goodbye):
                    return
                await asyncio.sleep(_PAUSE_S)
            except RedisDown:
                await asyncio.sleep(_RETRY_INTERVAL_S)

    async def _wait_until_seen(self, redis: RedisThreads, goodbye: PollResult) -> bool:
        """Wait until all other gateways have polled Redis, and have thereby read the goodbye.

        Wait at most `GOODBYE_SEEN_TIMEOUT_S` seconds. Return False if the goodbye must be sent
        again, because Redis has lost its data. After such a loss, each gateway writes the names of
        all gateways to Redis again. A gateway that has not read the goodbye also writes the name of
        this gateway, and the others would wait for this gateway's records.
        """
        until = time.monotonic() + GOODBYE_SEEN_TIMEOUT_S
        while True:
            result = await redis.poll()
            known = result.state
            if known.epoch != goodbye.state.epoch or self._gateway in known.gateways:
                return False
            if not known.gateways or result.oldest > goodbye.at or time.monotonic() > until:
                return True
            await asyncio.sleep(_PAUSE_S)

    async def follow(self) -> None:
        """Poll Redis, upload records, and remove expired records. Run until cancelled."""
        while True:
            next_poll = time.monotonic() + POLL_INTERVAL_S
            try:
                if self._redis is not None:
                    await self._share(self._redis)
                if self._holds_lock():
                    while await self._tidy():
                        if time.monotonic() >= next_poll:
                            break
                        await asyncio.sleep(_PAUSE_S)
            except (DiskUnavailable, RedisDown):
                pass
            except Exception:  # log the bug, and try again at the next poll
                log.exception("conversations are not looked after")
            await asyncio.sleep(max(_PAUSE_S, next_poll - time.monotonic()))

    async def _tidy(self) -> bool:
        more = await self._disk.run(ConversationDisk.tidy)
        self._stats.bytes, self._stats.records = await self._disk.run(ConversationDisk.usage)
        return more

    async def _share(self, redis: RedisThreads) -> None:
        while await self._report(redis):
            await self._upload(redis)
        if self._holds_lock():
            await self._apply_deletions(redis)
            self._keys.append(await self._disk.run(ConversationDisk.last_key))

    async def _report(self, redis: RedisThreads) -> bool:
        """Poll Redis, and report to the other gateways if Redis has all records of this disk.

        Return True if Redis lacks records, so that they must be uploaded. If the disk cannot be
        read, report nothing and raise DiskUnavailable. A worker that does not hold the folder's
        lock only polls, and returns False.
        """
        if not self._holds_lock():
            await redis.poll()
            return False
        if self._since < 0:
            # At the first call, use the state that was saved before the gateway's last end. The
            # comparison with it shows if Redis has lost records while the gateway did not run.
            last = await self._disk.run(ConversationDisk.load_state)
            self._since = last.since
            self._keys.append(last.key)
        result = await redis.poll(self._gateway)
        await self._mark_unshared(result.state.since)
        epoch = result.state.epoch
        unshared = await self._disk.run(lambda disk: disk.has_unshared(epoch))
        report = "open" if unshared or self._recheck_at < math.inf else "whole"
        # Send the `dirty` count from the poll above. If another worker has reported a new record
        # since that poll, the count differs, and Redis ignores this report.
        result = await redis.poll(self._gateway, report, (epoch, result.dirty))
        await self._save_state(redis.state._replace(since=self._since))
        return unshared

    async def _mark_unshared(self, since: int) -> None:
        """Mark the latest records on disk for another upload, if Redis may have lost them.

        `since` is `RedisState.since`, which changes when Redis may have lost some records. The
        records are marked when `since` has changed. They are marked again `_stale_s` seconds later,
        because other workers may have written to the old primary of Redis until then.
        """
        is_news, now = since != self._since, time.monotonic()
        if is_news and self._since > 0:  # 0 means that this disk was never used with Redis
            self._recheck_at = now + self._stale_s
        is_due = now >= self._recheck_at
        if is_news or is_due:
            after = self._keys[0]
            await self._disk.run(lambda disk: disk.mark_unshared(after))
        if is_due:
            self._recheck_at = math.inf
        self._since = since

    async def _save_state(self, state: RedisState) -> None:
        last = self._saved
        if state._replace(seen=last.seen) != last or state.seen >= last.seen + _SAVE_INTERVAL_MS:
            saved = SavedState(
                epoch=state.epoch,
                since=state.since,
                seen=state.seen,
                departed_ms=state.departed_ms,
                key=self._keys[0],
                gateways=state.gateways,
            )
            with contextlib.suppress(DiskUnavailable):
                await self._disk.run(lambda disk: disk.save_state(saved))
                self._saved = state

    async def _upload(self, redis: RedisThreads, *, in_haste: bool = False) -> None:
        """Upload all records that Redis lacks, in batches.

        To limit the load on Redis, wait after each batch for as long as its upload took. If
        `in_haste` is True, do not wait.
        """
        epoch = redis.epoch
        before: int | None = None
        reported_at = time.monotonic()
        while batch := await self._disk.run(partial(_next_batch, epoch=epoch, before=before)):
            began = time.monotonic()
            before = batch[-1].key
            newer = await redis.run(partial(_upload_batch, batch=batch), "put")
            await self._disk.run(partial(_mark_uploaded, batch=batch, newer=newer, epoch=epoch))
            if began - reported_at >= POLL_INTERVAL_S:
                reported_at = began
                if (await redis.poll(self._gateway, "open")).state.epoch != epoch:
                    return  # Redis has lost its data again, so the upload must restart
            if not in_haste:
                await asyncio.sleep(time.monotonic() - began)

    async def _apply_deletions(self, redis: RedisThreads) -> None:
        """Apply the deletions of other gateways to the records on this disk.

        Return after about one polling interval, even if some records are left. The call after the
        next poll deletes them.
        """
        epoch = redis.epoch
        until = time.monotonic() + POLL_INTERVAL_S
        while deletions := await redis.run(SharedConversations.read_deletions, "deleted"):
            await self._disk.run(partial(_forget, gone=deletions, epoch=epoch))
            if time.monotonic() >= until:
                return

    def _holds_lock(self) -> bool:
        try:
            return self._lock.take()
        except OSError:
            return False  # the folder cannot be used, so there is nothing to maintain

    def _is_last(self) -> bool:
        """Return True if no other worker of this gateway runs.

        Every running worker holds a shared lock on the workers' file. This method may release the
        lock of this worker. If the result is False, the worker must not use the folder any longer.
        """
        if self._worker_fd < 0:
            return False
        try:
            fcntl.flock(self._worker_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # Another worker holds the lock, so this worker is not the last. The failed attempt may
            # have released this worker's shared lock, which is no longer needed.
            return False
        return True


_Newer = list[tuple[str, list[Record]]]


def _next_batch(disk: ConversationDisk, epoch: int, before: int | None) -> list[DiskRecord]:
    return disk.list_unshared(epoch, before, _BATCH_RECORDS, _BATCH_BYTES)


def _forget(disk: ConversationDisk, gone: Sequence[Deletion], epoch: int) -> None:
    for each in gone:
        if each.is_group:
            disk.forget_unit(each.tenant, each.id)
        else:
            disk.forget(each.tenant, each.id, epoch)


def _upload_batch(shared: SharedConversations, batch: Sequence[DiskRecord]) -> _Newer:
    """Upload a batch of records to Redis.

    If Redis has a higher version of a record, for example a tombstone, the record is not uploaded.
    Return these higher versions as pairs: (tenant, records from Redis). The caller must write them
    to the disk.
    """
    newer: _Newer = []
    for (tenant, used_ms, _), some in groupby(
        batch, lambda stored: (stored.tenant, stored.used_ms, stored.record.unit)
    ):
        records = [stored.record for stored in some]
        try:
            put = shared.put(tenant, records, used_ms=used_ms)
            while not put.done:
                put = shared.put(tenant, records, used_ms=used_ms)
            if put.higher:
                copies = shared.get(tenant, put.higher).values()
                newer.append((tenant, [copy.record for copy in copies]))
        except ConversationTooLarge as error:
            log.warning("what tenant %r stores here does not fit into Redis: %s", tenant, error)
    return newer


def _mark_uploaded(
    disk: ConversationDisk, batch: Sequence[DiskRecord], newer: _Newer, epoch: int
) -> None:
    disk.mark_shared([stored.key for stored in batch], epoch)
    for tenant, records in newer:
        disk.put(tenant, records, epoch)
