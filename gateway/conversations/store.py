"""Store of tenants' responses and conversations, in Redis and on this gateway's disk.

Responses and conversations consist of records. The key of each record includes the tenant's name,
so a tenant cannot read the records of another tenant. A write succeeds if Redis or the disk has
stored the record. If a record is on the disk but not in Redis, the module `upkeep` uploads the
record to Redis. A record that is read from Redis is also written to this gateway's disk. The record
therefore remains available if the gateway that created it ends.

*Immutable records.* All copies of the record are equal, so the store returns any copy.

*Mutable records.* Two gateways may have different items of a conversation on their disks, so only
the copy in Redis is valid. A new item of a conversation must therefore be stored in Redis.

When Redis has lost its data, all gateways upload their records again. Mutable records that were
written after the loss are returned at once. Reads of other mutable records, and of records that
Redis lacks, wait until the uploads are complete. If a gateway's disk was deleted before the upload,
mutable records that are older than this deletion may be incomplete. The store then reports them as
missing.

See decision 067 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from enum import Enum, auto
from functools import partial
from pathlib import Path
from types import TracebackType

from gateway.conversations.disk import FILE, ConversationDisk
from gateway.conversations.disk_thread import DiskThread, DiskUnavailable
from gateway.conversations.record import (
    DELETED,
    FINAL,
    GROWING_PREFIX,
    MAX_READ_BYTES,
    Record,
    check_record,
    is_id,
)
from gateway.conversations.redis_threads import RedisDown, RedisThreads
from gateway.conversations.shared import RedisState, SharedConversations
from gateway.conversations.stats import ConversationStats
from gateway.conversations.tenant_records import Copy
from gateway.conversations.upkeep import Upkeep
from gateway.errors import ConversationsOff, ConversationsUnavailable, ConversationTooLarge

log = logging.getLogger(__name__)

# A conversation that is read expires later. To save writes, its expiry is set anew only once per
# interval. The interval is a tenth of the time to live, at most this number of seconds.
_MAX_RENEW_INTERVAL_S = 3600.0
_MAX_EVICTION_STEPS = 64  # maximum calls for one put; each call evicts a limited number of records
_RESTORE_TIMEOUT_S = 5.0  # maximum time that a read waits for uploads after Redis has lost data
_RETRY_INTERVAL_S = 0.2
# Minimum timeout of a call to Redis. A call may take long, because values are large, and because
# Redis answers no client while it forks to write a snapshot.
_MIN_REDIS_TIMEOUT_S = 2.0


class Conversations:
    """Store of tenants' responses and conversations.

    Use an instance as an async context manager. While the context is open, `follow` must run in a
    task.
    """

    def __init__(
        self,
        folder: Path,
        redis_url: str | None = None,
        *,
        ttl_s: int,
        tenant_bytes: int,
        redis_timeout_s: float = _MIN_REDIS_TIMEOUT_S,
        ephemeral: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Create the store. Entering the context opens its file and connects to Redis.

        Args:
            folder: The folder of the SQLite file with the copies on this gateway's disk.
            redis_url: A URL in the syntax of `lora_store.redis_url`; None for a store without
                Redis.
            ttl_s: The time to live of unused records in seconds; 0 disables the store.
            tenant_bytes: The maximum number of bytes that the records of one tenant may have.
            redis_timeout_s: The timeout of each call to Redis in seconds.
            ephemeral: True if the folder is deleted when the gateway ends.
            clock: Returns seconds since 1970.
        """
        self.enabled = ttl_s > 0
        self.stats = ConversationStats()
        self._folder = folder
        bounds = {
            "ttl_ms": ttl_s * 1000,
            "tenant_bytes": tenant_bytes,
            "renew_ms": int(min(ttl_s / 10, _MAX_RENEW_INTERVAL_S) * 1000),
        }
        make = partial(ConversationDisk, folder, **bounds, clock=clock)
        self._disk = DiskThread(folder, make, self.stats)
        self._redis: RedisThreads | None = None
        if redis_url is not None:
            timeout_s = max(_MIN_REDIS_TIMEOUT_S, redis_timeout_s)
            shared = SharedConversations(
                redis_url, timeout_s=timeout_s, **bounds, on_refused=self.stats.count_refused
            )
            self._redis = RedisThreads(shared, self.stats)
        self._upkeep = Upkeep(folder, self._disk, self._redis, self.stats, ephemeral=ephemeral)

    async def __aenter__(self) -> Conversations:
        if self.enabled:
            await self._disk.open()
            await self._upkeep.poll_first()
        else:
            await asyncio.to_thread(_remove_files, self._folder)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.enabled:
            await self._upkeep.depart()
        if self._redis is not None:
            await self._redis.close()
        await self._disk.close()
        self._upkeep.close()

    async def follow(self) -> None:
        """Upload records that Redis lacks, and remove expired records. Run until cancelled."""
        if self.enabled:
            await self._upkeep.follow()

    @property
    def problems(self) -> tuple[str, str]:
        """Two error texts for operators: the first about the disk, the second about Redis.

        The first text is empty while the disk can store conversations, and the second text is empty
        while Redis can store conversations, or if no Redis is configured.
        """
        return self._disk.problem, "" if self._redis is None else self._redis.problem

    @property
    def redis_time_ms(self) -> int:
        """Time of Redis' clock at the last poll, in ms since 1970; 0 before the first poll.

        A new record without a group must have this time as its `Record.order`. For a tombstone, the
        time is not needed.
        """
        return 0 if self._redis is None else self._redis.state.seen

    async def put(self, tenant: str, records: Sequence[Record]) -> None:
        """Store records. A stored record with a higher version is not replaced.

        If the call fails, no record is stored, with one exception: more than 64 records are written
        to Redis in several batches. If Redis fails between two batches, the first ones may remain.

        Raises:
            ConversationsOff: The store is disabled.
            ConversationTooLarge: The records are too large to be stored at once, or a conversation
                or response would be too large.
            ConversationsUnavailable: Neither Redis nor the disk can store the records now, or a
                record of a conversation cannot be stored in Redis.
        """
        if not self.enabled:
            raise ConversationsOff
        records = [check_record(record) for record in records]
        if (size := sum(len(record.data) for record in records)) > MAX_READ_BYTES:
            raise ConversationTooLarge(f"{size} bytes are too much to be stored at once.")
        if records:
            epoch, accepted = await self._put_shared(tenant, records)
            if (
                not accepted
                and self._redis is not None
                and any(record.is_growing for record in records)
            ):
                raise _unavailable_error()
            if (
                not await self._put_disk(tenant, records, epoch, certain=not accepted)
                and not accepted
            ):
                raise _unavailable_error()
            if not accepted:
                await self._upkeep.report_refused()

    async def get(
        self, tenant: str, ids: Sequence[str], *, patient: bool = True
    ) -> list[Record | None]:
        """Return the records with these ids, in the order of `ids`. A missing record is None.

        The records count as used now, so they expire later. If Redis has lost its data, other
        gateways may still upload a missing record: wait for these uploads, unless `patient` is
        False.

        Raises:
            ConversationsUnavailable: The store cannot be read now.
            ConversationTooLarge: The records exceed `MAX_READ_BYTES`.
        """
        wanted = [id_ for id_ in dict.fromkeys(ids) if is_id(id_)]
        found: dict[str, Copy] = {}

        async def look_up(epoch: int) -> _Certainty:
            missing = [id_ for id_ in wanted if id_ not in found or found[id_].may_change]
            copies, answered = await self._get_once(tenant, missing)
            for id_ in missing:
                found.pop(id_, None)
            found.update(copies)
            if all(id_ in found and not found[id_].may_change for id_ in wanted):
                return _Certainty.ALWAYS
            if not answered:
                return _Certainty.NEVER
            if not patient:
                return _Certainty.ALWAYS
            epochs = [copy.epoch for copy in copies.values() if copy.may_change]
            is_fresh = len(found) == len(wanted) and all(each == epoch for each in epochs)
            return _Certainty.UNLESS_LOST if is_fresh else _Certainty.IF_SETTLED

        state = await self._look_up_until_sure(look_up) if self.enabled and wanted else RedisState()
        return [_to_live_record(found.get(id_), state) for id_ in ids]

    async def members(
        self,
        tenant: str,
        group: str,
        *,
        after: int = -1,
        limit: int = 1000,
        require_complete: bool = True,
    ) -> list[Record]:
        """Return a group's records whose `order` is above `after`, sorted by `order`.

        At most `limit` records are returned. `group` is the id of a conversation or response.

        Raise the same errors as `get`. Also raise ConversationsUnavailable if some records of a
        conversation are missing, for example because another call is removing the conversation. If
        `require_complete` is False, return the records that exist instead.
        """
        found: list[Record] = []
        epochs: list[int] = []
        began = 0

        async def look_up(epoch: int) -> _Certainty:
            nonlocal began
            try:
                found[:], epochs[:], began = await self._members_once(tenant, group, after, limit)
            except RedisDown:
                return _Certainty.NEVER
            is_fresh = all(each == epoch for each in epochs)
            return _Certainty.UNLESS_LOST if is_fresh else _Certainty.IF_SETTLED

        if self.enabled and is_id(group):
            state = await self._look_up_until_sure(look_up)
            is_short = -1 in epochs or (epochs[0] != state.epoch and began < state.lost)
            if require_complete and group.startswith(GROWING_PREFIX) and is_short:
                raise _unavailable_error()
        members = [each for each in found if each.data and each.group == group]
        return sorted(members, key=lambda each: (each.order, each.id))[:limit]

    async def delete(self, tenant: str, ids: Sequence[str]) -> None:
        """Delete the records with these ids.

        Tombstones replace the records, so a copy that another gateway uploads later is not stored.
        Raise the same errors as `put`, except ConversationsOff.
        """
        if self.enabled:
            await self.put(tenant, [Record(id_, b"", DELETED) for id_ in ids if is_id(id_)])

    async def _put_shared(self, tenant: str, records: Sequence[Record]) -> tuple[int, bool]:
        """Store records in Redis.

        Return two values: the epoch of Redis (`RedisState.epoch`), and True if Redis has all
        records now. The epoch is 0 if there is no Redis, or if Redis has failed.

        Raises:
            ConversationTooLarge: The records do not fit into the tenant's limit.
            ConversationsUnavailable: Even 64 calls of Redis have not evicted enough other records
                to make space for the new records.
        """
        redis = self._redis
        if redis is None:
            return 0, False
        # Read the epoch before the records are stored. If Redis loses its data in between, a new
        # epoch begins. The disk then has the old epoch for these records, so that they are uploaded
        # again.
        epoch = redis.epoch
        try:
            for _ in range(_MAX_EVICTION_STEPS):
                put = await redis.run(lambda shared: shared.put(tenant, records, epoch), "put")
                self.stats.evicted += put.evicted
                if put.done:
                    return epoch, put.accepted
        except RedisDown:
            return 0, False
        raise _eviction_error()

    async def _put_disk(
        self, tenant: str, records: Sequence[Record], epoch: int, *, certain: bool = False
    ) -> bool:
        """Store records on the disk. Return True if they were stored, or False if the disk fails.

        Set `certain` to True if Redis does not have the records. In this case, other records are
        evicted until the new records fit, and an error is raised if the new records are too large.
        If `certain` is False, this method tries once, and returns False instead of raising errors.
        """
        try:
            for _ in range(_MAX_EVICTION_STEPS if certain else 1):
                put = await self._disk.run(lambda disk: disk.put(tenant, records, epoch))
                self.stats.evicted += put.evicted
                if put.done:
                    return True
        except DiskUnavailable:
            return False
        except ConversationTooLarge:
            if certain:
                raise
            return False
        if certain:
            raise _eviction_error()
        return False

    async def _look_up_until_sure(
        self, look_up: Callable[[int], Awaitable[_Certainty]]
    ) -> RedisState:
        """Call `look_up` repeatedly until it has found all records that exist.

        After Redis has lost its data, records are missing until other gateways have uploaded them.
        `look_up` gets the epoch of Redis as its argument. It returns the condition under which its
        result is complete. This method polls Redis to check the condition.

        Return the state of Redis at the last call, or an empty state if the result does not depend
        on Redis. Raise ConversationsUnavailable if Redis fails, or if records may still be missing
        after 5 s.
        """
        redis = self._redis
        loop = asyncio.get_running_loop()
        until = loop.time() + _RESTORE_TIMEOUT_S
        while True:
            epoch = 0 if redis is None else redis.epoch
            sure = await look_up(epoch)
            if sure is _Certainty.ALWAYS or redis is None:
                return RedisState()
            with contextlib.suppress(RedisDown):
                if redis.is_up and sure is not _Certainty.NEVER:
                    now = await redis.poll()
                    lost_nothing = sure is _Certainty.UNLESS_LOST and now.state.since == epoch
                    if now.state.epoch == epoch and (now.settled or lost_nothing):
                        return now.state
            if not redis.is_up:
                raise _unavailable_error()
            if loop.time() >= until:
                raise ConversationsUnavailable(
                    "What was stored is being restored and is not complete yet: try again."
                )
            await asyncio.sleep(_RETRY_INTERVAL_S)

    async def _get_once(self, tenant: str, ids: Sequence[str]) -> tuple[dict[str, Copy], bool]:
        """Read records from Redis. If Redis lacks immutable records, read these from the disk.

        The records from Redis are also written to the disk. The records from the disk are also
        uploaded to Redis, unless they belong to a group. Return two values: the records by id, and
        True if Redis has answered or no Redis is configured.
        """
        redis = self._redis
        if redis is None:
            return {each.id: Copy(each, 0) for each in await self._read_disk(tenant, ids)}, True
        copies: dict[str, Copy] = {}
        answered = False
        with contextlib.suppress(RedisDown):
            epoch = redis.epoch
            copies = await redis.run(lambda shared: shared.get(tenant, ids))
            answered = True
            await self._copy_to_disk(tenant, copies, epoch)
        missing = [id_ for id_ in ids if id_ not in copies]
        # Use only immutable records from the disk. The disk's copy of a mutable record may be older
        # than the last copy in Redis.
        found = [each for each in await self._read_disk(tenant, missing) if each.version >= FINAL]
        alone = [each for each in found if not each.group]
        with contextlib.suppress(RedisDown, ConversationTooLarge):
            if alone:
                await redis.run(lambda shared: shared.put(tenant, alone), "put")
        return copies | {each.id: Copy(each, 0) for each in found}, answered

    async def _members_once(
        self, tenant: str, group: str, after: int, limit: int
    ) -> tuple[list[Record], list[int], int]:
        """Read records of a group once. Raise RedisDown if Redis fails.

        A group has a head: the record whose id is the group's id. Return three values:

        1. the records of the group;
        2. the `Copy.epoch` of the head and of each record; a -1 in this list means that the head or
           some of the records are missing;
        3. the `order` of the head.
        """
        redis = self._redis
        if redis is None:
            ids: list[str] = []
            with self._tolerate_disk_failure():
                ids = await self._disk.run(lambda disk: disk.members(tenant, group, after, limit))
            records = await self._read_disk(tenant, [group, *ids])
            return records, [0 if len(records) == len(ids) + 1 else -1], 0
        epoch = redis.epoch
        found = await redis.run(lambda shared: shared.members(tenant, group, after, limit))
        await self._copy_to_disk(tenant, found.copies, epoch)
        records = [copy.record for copy in found.copies.values()]
        lost = [id_ for id_ in found.ids if id_ not in found.copies]
        epochs = [found.epoch, *[copy.epoch for copy in found.copies.values()]]
        if lost:  # Redis' memory policy may have removed single members: read them from disk
            records += (back := await self._read_disk(tenant, lost))
            epochs.append(0 if len(back) == len(lost) else -1)
        return records, epochs, found.began

    async def _copy_to_disk(self, tenant: str, copies: Mapping[str, Copy], epoch: int) -> None:
        if copies:
            await self._put_disk(tenant, [copy.record for copy in copies.values()], epoch)

    async def _read_disk(self, tenant: str, ids: Sequence[str]) -> list[Record]:
        with self._tolerate_disk_failure():
            if ids:
                records = await self._disk.run(lambda disk: disk.get(tenant, ids))
                return [each.record for each in records]
        return []

    @contextlib.contextmanager
    def _tolerate_disk_failure(self) -> Iterator[None]:
        """Ignore DiskUnavailable if Redis is used; otherwise raise ConversationsUnavailable."""
        try:
            yield
        except DiskUnavailable:
            if self._redis is None:
                raise _unavailable_error() from None


class _Certainty(Enum):
    """Condition under which a lookup has found all records that exist.

    A lookup may have missed records if Redis has lost its data and gateways still upload records.
    """

    ALWAYS = auto()
    UNLESS_LOST = auto()  # complete if Redis has lost no writes in the present epoch
    IF_SETTLED = auto()  # complete if all gateways have uploaded all records (`PollResult.settled`)
    NEVER = auto()  # incomplete, because Redis has not answered


def _to_live_record(copy: Copy | None, state: RedisState) -> Record | None:
    if copy is None or not copy.record.data:
        return None
    record = copy.record
    is_restored = copy.may_change and copy.epoch != state.epoch
    return None if is_restored and not record.group and record.order < state.lost else record


def _eviction_error() -> ConversationsUnavailable:
    return ConversationsUnavailable(
        "Space is being freed for what this tenant wants to store: try again."
    )


def _unavailable_error() -> ConversationsUnavailable:
    return ConversationsUnavailable("Conversations cannot be read or stored now: try again.")


def _remove_files(folder: Path) -> None:
    """Delete the SQLite files of a store that is disabled."""
    for end in ("", "-wal", "-shm"):
        try:
            (folder / f"{FILE}{end}").unlink(missing_ok=True)
        except OSError as error:
            log.error("%s%s is still there: %s", folder / FILE, end, error)
