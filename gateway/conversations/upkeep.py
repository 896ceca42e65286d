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

from gateway.conversations.disk import ConversationDisk, Looked
from gateway.conversations.disk_thread import DiskAway, DiskThread
from gateway.conversations.notices import Gone
from gateway.conversations.record import Kept, Record
from gateway.conversations.redis_threads import RedisAway, RedisThreads
from gateway.conversations.shared import EPHEMERAL, Known, Look, SharedConversations
from gateway.conversations.stats import Stats
from gateway.errors import ConversationTooLarge
from lora_store.folder_lock import FolderLock

log = logging.getLogger(__name__)

LOOK_S = 1.0
_STEP_S = 0.01
_BATCH = 64
_BATCH_BYTES = 4 * 1024 * 1024
# What a Redis that was away may have lost of the last that it took; it writes each second, at most.
_DOUBTFUL_LOOKS = 60
_REMEMBERED_MS = 60_000
GOODBYE_S = 10.0
"""For which a gateway that ends brings what Redis lacks. Whoever stops it has to wait as long."""
HEARD_S = 2.0
"""Within which others look again: each second, unless they have just died or have no turn."""
_AGAIN_S = 0.2  # after a call of the goodbye that failed


class Upkeep:
    """Of all workers with the same folder, the one that holds its lock is at work."""

    def __init__(
        self,
        folder: Path,
        disk: DiskThread,
        redis: RedisThreads | None,
        stats: Stats,
        *,
        ephemeral: bool = False,
    ) -> None:
        """`ephemeral`: the folder ends with the gateway."""
        self._lock = FolderLock(folder / "lock", mode=0o600)
        self._ephemeral = ephemeral
        self._workers = folder / "workers"
        self._worker = -1  # a file that each holds a shared lock of
        self._disk = disk
        self._redis = redis
        self._stats = stats
        # That of all its workers: whichever says that something is to be brought, one brings it.
        name = f"{socket.gethostname()}:{folder.absolute()}"
        self._gateway = f"{EPHEMERAL}{name}" if ephemeral else name
        self._keys: deque[int] = deque(maxlen=_DOUBTFUL_LOOKS)
        self._since = -1
        # Other workers may notice later that Redis was replaced, and write to the old one until
        # then. This worker would take that for shared, so all is brought again after `_stale_s`.
        self._stale_s = 0.0 if redis is None else redis.stale_s
        self._again_at = math.inf
        self._remembered = Known()

    def close(self) -> None:
        self._lock.release()
        if self._worker >= 0:
            os.close(self._worker)

    async def first_look(self) -> None:
        """Before anybody asks: whether there is something to bring is known to all at once."""
        if self._redis is not None:
            with contextlib.suppress(OSError):  # without a disk nobody says goodbye
                self._worker = os.open(self._workers, os.O_RDWR | os.O_CREAT, 0o600)
                fcntl.flock(self._worker, fcntl.LOCK_SH)
            with contextlib.suppress(DiskAway):
                last = await self._disk.run(ConversationDisk.looked)
                epoch, since, seen, left, _, gateways = last
                self._redis.known = Known(epoch, since, seen, left, gateways=gateways)
            with contextlib.suppress(DiskAway, RedisAway):
                await self._tell(self._redis)

    async def refused(self) -> None:
        """Redis has not taken something, which this disk alone has by now."""
        if self._redis is not None and self._redis.up:
            with contextlib.suppress(RedisAway):
                await self._redis.look(self._gateway, "dirty")

    async def leave(self) -> None:
        """Says goodbye, if the folder ends with the gateway and this worker is its last.

        `follow` has ended, and nothing is put any more.
        """
        self._lock.release()  # for the one that is last
        # A worker that held the lock may have ended with a second bring still due.
        self._stale_s = self._again_at = 0.0
        if self._ephemeral and self._redis is not None and self._is_last() and self._holds_lock():
            try:
                async with asyncio.timeout(GOODBYE_S):
                    await self._say_goodbye(self._redis)
            except (DiskAway, TimeoutError):
                log.warning("other gateways wait for what is kept here alone: Redis has not all")
            else:
                log.info("no other gateway waits for what was kept here: Redis has it")

    async def _say_goodbye(self, redis: RedisThreads) -> None:
        """Until Redis has taken it: one call that fails is no reason to be waited for an hour."""
        while True:
            try:
                while await self._tell(redis):
                    await self._bring(redis, in_haste=True)
                look = await redis.look(self._gateway)
                told = (look.known.epoch, look.dirty)
                said = await redis.look(self._gateway, "bye", told)
                if said.whole and await self._is_heard(redis, said):
                    return
                await asyncio.sleep(_STEP_S)
            except RedisAway:
                await asyncio.sleep(_AGAIN_S)

    async def _is_heard(self, redis: RedisThreads, said: Look) -> bool:
        """Waits until all others have looked since. False where it has to be said again.

        Whoever knows Redis only as it was before that was emptied tells it of all gateways, this
        one among them, and all would wait for it.
        """
        until = time.monotonic() + HEARD_S
        while True:
            look = await redis.look()
            known = look.known
            if known.epoch != said.known.epoch or self._gateway in known.gateways:
                return False
            if not known.gateways or look.oldest > said.at or time.monotonic() > until:
                return True
            await asyncio.sleep(_STEP_S)

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            next_look = time.monotonic() + LOOK_S
            try:
                if self._redis is not None:
                    await self._keep_shared(self._redis)
                if self._holds_lock():
                    while await self._tidy():
                        if time.monotonic() >= next_look:
                            break
                        await asyncio.sleep(_STEP_S)
            except (DiskAway, RedisAway):
                pass
            except Exception:  # a mistake of ours; the gateway goes on without this
                log.exception("conversations are not looked after")
            await asyncio.sleep(max(_STEP_S, next_look - time.monotonic()))

    async def _tidy(self) -> bool:
        more = await self._disk.run(ConversationDisk.tidy)
        self._stats.bytes, self._stats.records = await self._disk.run(ConversationDisk.usage)
        return more

    async def _keep_shared(self, redis: RedisThreads) -> None:
        while await self._tell(redis):
            await self._bring(redis)
        if self._holds_lock():
            await self._take_deleted(redis)
            self._keys.append(await self._disk.run(ConversationDisk.last_key))

    async def _tell(self, redis: RedisThreads) -> bool:
        """Looks, and says whether Redis has all that this disk has: if not, it is to be brought.

        Of a disk that cannot be read nothing is said.
        """
        if not self._holds_lock():
            await redis.look()
            return False
        if self._since < 0:
            # Redis may have lost something while nobody here looked.
            last = await self._disk.run(ConversationDisk.looked)
            self._since = last.since
            self._keys.append(last.key)
        look = await redis.look(self._gateway)
        await self._unshare(look.known.since)
        epoch = look.known.epoch
        unshared = await self._disk.run(lambda disk: disk.has_unshared(epoch))
        says = "open" if unshared or self._again_at < math.inf else "whole"
        # What another worker has refused since then, this does not take back.
        look = await redis.look(self._gateway, says, (epoch, look.dirty))
        await self._remember(redis.known._replace(since=self._since))
        return unshared

    async def _unshare(self, since: int) -> None:
        """Bring what Redis may have lost: when it has another `since`, and once more later."""
        is_news, now = since != self._since, time.monotonic()
        if is_news and self._since > 0:  # else this disk has seen no Redis before
            self._again_at = now + self._stale_s
        is_due = now >= self._again_at
        if is_news or is_due:
            after = self._keys[0]
            await self._disk.run(lambda disk: disk.unshare(after))
        if is_due:
            self._again_at = math.inf
        self._since = since

    async def _remember(self, known: Known) -> None:
        last = self._remembered
        if known._replace(seen=last.seen) != last or known.seen >= last.seen + _REMEMBERED_MS:
            looked = Looked(
                epoch=known.epoch,
                since=known.since,
                seen=known.seen,
                left=known.left,
                key=self._keys[0],
                gateways=known.gateways,
            )
            with contextlib.suppress(DiskAway):
                await self._disk.run(lambda disk: disk.set_looked(looked))
                self._remembered = known

    async def _bring(self, redis: RedisThreads, *, in_haste: bool = False) -> None:
        """In batches, resting as long as each takes, unless `in_haste`."""
        epoch = redis.epoch
        before: int | None = None
        told = time.monotonic()
        while batch := await self._disk.run(partial(_next, epoch=epoch, before=before)):
            began = time.monotonic()
            before = batch[-1].key
            newer = await redis.run(partial(_put, batch=batch), "put")
            await self._disk.run(partial(_brought, batch=batch, newer=newer, epoch=epoch))
            if began - told >= LOOK_S:
                told = began
                if (await redis.look(self._gateway, "open")).known.epoch != epoch:
                    return  # it was lost again
            if not in_haste:
                await asyncio.sleep(time.monotonic() - began)

    async def _take_deleted(self, redis: RedisThreads) -> None:
        """Forget what others have deleted; of very many the rest with the next look."""
        epoch = redis.epoch
        until = time.monotonic() + LOOK_S
        while gone := await redis.run(SharedConversations.deleted, "deleted"):
            await self._disk.run(partial(_forget, gone=gone, epoch=epoch))
            if time.monotonic() >= until:
                return

    def _holds_lock(self) -> bool:
        try:
            return self._lock.take()
        except OSError:
            return False  # nor is there a disk to look after

    def _is_last(self) -> bool:
        """Of the gateway's workers; whoever asks this uses the folder no more."""
        if self._worker < 0:
            return False
        try:
            fcntl.flock(self._worker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            # It may have lost its own lock by that, which is as well.
            return False
        return True


_Newer = list[tuple[str, list[Record]]]


def _next(disk: ConversationDisk, epoch: int, before: int | None) -> list[Kept]:
    return disk.unshared(epoch, before, _BATCH, _BATCH_BYTES)


def _forget(disk: ConversationDisk, gone: Sequence[Gone], epoch: int) -> None:
    for each in gone:
        if each.is_group:
            disk.forget_unit(each.tenant, each.id)
        else:
            disk.forget(each.tenant, each.id, epoch)


def _put(shared: SharedConversations, batch: Sequence[Kept]) -> _Newer:
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


def _brought(disk: ConversationDisk, batch: Sequence[Kept], newer: _Newer, epoch: int) -> None:
    disk.set_shared([kept.key for kept in batch], epoch)
    for tenant, records in newer:
        disk.put(tenant, records, epoch)
