"""What one worker of a gateway does for all: brings to Redis what only this disk keeps, takes what
was deleted elsewhere, and removes what has expired.

A Redis that has lost everything has another epoch, in which nothing was brought yet. The gateways
know each other, over restarts too, and until each has said that all of its disk is there, what is
not found is not called lost. A gateway whose disk ends with it says goodbye instead, once Redis has
all that is on it, and nobody waits for it any more.
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
from gateway.conversations.record import Record, StoredRecord
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
# What a Redis that was away may have lost of the last that it took; it writes each second, at most.
_DOUBTFUL_POLLS = 60
_SAVE_INTERVAL_MS = 60_000
GOODBYE_TIMEOUT_S = 10.0
"""For which a gateway that ends brings what Redis lacks. Whoever stops it has to wait as long."""
GOODBYE_SEEN_TIMEOUT_S = 2.0
"""Within which others look again: each second, unless they have just died or have no turn."""
_RETRY_INTERVAL_S = 0.2  # after a call of the goodbye that failed


class Upkeep:
    """Of all workers with the same folder, the one that holds its lock is at work."""

    def __init__(
        self,
        folder: Path,
        disk: DiskThread,
        redis: RedisThreads | None,
        stats: ConversationStats,
        *,
        ephemeral: bool = False,
    ) -> None:
        """`ephemeral`: the folder ends with the gateway."""
        self._lock = FolderLock(folder / "lock", mode=0o600)
        self._ephemeral = ephemeral
        self._workers_file = folder / "workers"
        self._worker_fd = -1  # a file that each holds a shared lock of
        self._disk = disk
        self._redis = redis
        self._stats = stats
        # That of all its workers: whichever says that something is to be brought, one brings it.
        name = f"{socket.gethostname()}:{folder.absolute()}"
        self._gateway = f"{EPHEMERAL_PREFIX}{name}" if ephemeral else name
        self._keys: deque[int] = deque(maxlen=_DOUBTFUL_POLLS)
        self._since = -1
        # Other workers may notice later that Redis was replaced, and write to the old one until
        # then. This worker would take that for shared, so all is brought again after `_stale_s`.
        self._stale_s = 0.0 if redis is None else redis.stale_s
        self._recheck_at = math.inf
        self._saved = RedisState()

    def close(self) -> None:
        self._lock.let_go()
        if self._worker_fd >= 0:
            os.close(self._worker_fd)

    async def poll_first(self) -> None:
        """Before anybody asks: whether there is something to bring is known to all at once."""
        if self._redis is not None:
            with contextlib.suppress(OSError):  # without a disk nobody says goodbye
                self._worker_fd = os.open(self._workers_file, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(self._worker_fd, fcntl.LOCK_SH)
            with contextlib.suppress(DiskUnavailable):
                last = await self._disk.run(ConversationDisk.load_state)
                epoch, since, seen, left, _, gateways = last
                self._redis.state = RedisState(epoch, since, seen, left, gateways=gateways)
            with contextlib.suppress(DiskUnavailable, RedisDown):
                await self._report(self._redis)

    async def report_refused(self) -> None:
        """Redis has not taken something, which this disk alone has by now."""
        if self._redis is not None and self._redis.is_up:
            with contextlib.suppress(RedisDown):
                await self._redis.poll(self._gateway, "dirty")

    async def depart(self) -> None:
        """Says goodbye, if the folder ends with the gateway and this worker is its last.

        `follow` has ended, and nothing is put any more.
        """
        self._lock.let_go()  # for the one that is last
        # A worker that held the lock may have ended with a second bring still due.
        self._stale_s = self._recheck_at = 0.0
        if self._ephemeral and self._redis is not None and self._is_last() and self._holds_lock():
            try:
                async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                    await self._send_goodbye(self._redis)
            except (DiskUnavailable, TimeoutError):
                log.warning("other gateways wait for what is kept here alone: Redis has not all")
            else:
                log.info("no other gateway waits for what was kept here: Redis has it")

    async def _send_goodbye(self, redis: RedisThreads) -> None:
        """Until Redis has taken it: one call that fails is no reason to be waited for an hour."""
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
        """Waits until all others have looked since. False where it has to be said again.

        Whoever knows Redis only as it was before that was emptied tells it of all gateways, this
        one among them, and all would wait for it.
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
        """Until cancelled."""
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
            except Exception:  # a mistake of ours; the gateway goes on without this
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
        """Looks, and says whether Redis has all that this disk has: if not, it is to be brought.

        Of a disk that cannot be read nothing is said.
        """
        if not self._holds_lock():
            await redis.poll()
            return False
        if self._since < 0:
            # Redis may have lost something while nobody here looked.
            last = await self._disk.run(ConversationDisk.load_state)
            self._since = last.since
            self._keys.append(last.key)
        result = await redis.poll(self._gateway)
        await self._mark_unshared(result.state.since)
        epoch = result.state.epoch
        unshared = await self._disk.run(lambda disk: disk.has_unshared(epoch))
        report = "open" if unshared or self._recheck_at < math.inf else "whole"
        # What another worker has refused since then, this does not take back.
        result = await redis.poll(self._gateway, report, (epoch, result.dirty))
        await self._save_state(redis.state._replace(since=self._since))
        return unshared

    async def _mark_unshared(self, since: int) -> None:
        """Bring what Redis may have lost: when it has another `since`, and once more later."""
        is_news, now = since != self._since, time.monotonic()
        if is_news and self._since > 0:  # else this disk has seen no Redis before
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
        """In batches, resting as long as each takes, unless `in_haste`."""
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
                    return  # it was lost again
            if not in_haste:
                await asyncio.sleep(time.monotonic() - began)

    async def _apply_deletions(self, redis: RedisThreads) -> None:
        """Forget what others have deleted; of very many the rest with the next look."""
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
            return False  # nor is there a disk to look after

    def _is_last(self) -> bool:
        """Of the gateway's workers; whoever asks this uses the folder no more."""
        if self._worker_fd < 0:
            return False
        try:
            fcntl.flock(self._worker_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # It may have lost its own lock by that, which is as well.
            return False
        return True


_Newer = list[tuple[str, list[Record]]]


def _next_batch(disk: ConversationDisk, epoch: int, before: int | None) -> list[StoredRecord]:
    return disk.list_unshared(epoch, before, _BATCH_RECORDS, _BATCH_BYTES)


def _forget(disk: ConversationDisk, gone: Sequence[Deletion], epoch: int) -> None:
    for each in gone:
        if each.is_group:
            disk.forget_unit(each.tenant, each.id)
        else:
            disk.forget(each.tenant, each.id, epoch)


def _upload_batch(shared: SharedConversations, batch: Sequence[StoredRecord]) -> _Newer:
    """Gives what Redis has in higher versions, by tenant: some was deleted elsewhere, say."""
    newer: _Newer = []
    for (tenant, used_ms, _), some in groupby(
        batch, lambda kept: (kept.tenant, kept.used_ms, kept.record.unit)
    ):
        records = [kept.record for kept in some]
        try:
            put = shared.put(tenant, records, used_ms=used_ms)
            while not put.done:
                put = shared.put(tenant, records, used_ms=used_ms)
            if put.higher:
                copies = shared.get(tenant, put.higher).values()
                newer.append((tenant, [copy.record for copy in copies]))
        except ConversationTooLarge as error:
            log.warning("what tenant %r keeps here has no room in Redis: %s", tenant, error)
    return newer


def _mark_uploaded(
    disk: ConversationDisk, batch: Sequence[StoredRecord], newer: _Newer, epoch: int
) -> None:
    disk.mark_shared([kept.key for kept in batch], epoch)
    for tenant, records in newer:
        disk.put(tenant, records, epoch)
