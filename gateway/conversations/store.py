"""Responses and conversations of tenants, kept in Redis and on this gateway's disk.

Everything is keyed by its tenant: the id of another's record is simply not found. What either copy
took is kept: a disk brings to Redis what that lacks (`upkeep`), and what is read from Redis is put
on this disk, so that it outlives the gateway that wrote it.

What changes no more any copy is good for. All else is as Redis has it, and what grows has to be in
Redis to be kept: a disk may have less of it than another. While something is still to be brought,
by whichever gateway, that counts of it alone which was put since Redis was empty; the rest, and
what is not found, is waited for. Where a gateway has gone for good, with its disk, what had begun
before is not found once all is brought: nobody can say that it is whole.
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

_MAX_RENEW_INTERVAL_S = 3600.0  # and a tenth of the time to live at most
_MAX_EVICTION_STEPS = 64  # for which one put waits until there is room
_RESTORE_TIMEOUT_S = 5.0  # for which one that is not found is waited for
_RETRY_INTERVAL_S = 0.2
_MIN_REDIS_TIMEOUT_S = (
    2.0  # of one call at least; the values are large, and Redis forks for its snapshots
)


class Conversations:
    """Use as an async context manager, with `follow` running inside."""

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
        """`redis_url` in a form of `lora_store.redis_url`; `ephemeral`: the folder ends with the
        gateway; `clock` gives seconds of 1970."""
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
        """Until cancelled."""
        if self.enabled:
            await self._upkeep.follow()

    @property
    def problems(self) -> tuple[str, str]:
        """Why the disk, and then Redis, cannot store conversations; empty if they can."""
        return self._disk.problem, "" if self._redis is None else self._redis.problem

    @property
    def redis_time_ms(self) -> int:
        """That of Redis, in ms since 1970, a moment ago: the order of what begins now and will
        change or grow. 0 before it was seen."""
        return 0 if self._redis is None else self._redis.state.seen

    async def put(self, tenant: str, records: Sequence[Record]) -> None:
        """Store all of the records or none, of each the highest version that there is.

        Of more than 64 a Redis that fails meanwhile has some, and this raises.

        Raises ConversationsOff, ConversationTooLarge and ConversationsUnavailable.
        """
        if not self.enabled:
            raise ConversationsOff
        records = [check_record(record) for record in records]
        if (size := sum(len(record.data) for record in records)) > MAX_READ_BYTES:
            raise ConversationTooLarge(f"{size} bytes are too much to be kept at once.")
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
        """What is kept under these ids, in their order. Its time to live begins anew.

        Who is not `patient` gets what there is now. Raises ConversationsUnavailable, and
        ConversationTooLarge for more than `MAX_READ_BYTES` bytes.
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
        """The first `limit` records of a group behind the place `after`, by order.

        Raises as `get`, and ConversationsUnavailable for what grows and is just being removed; not
        `whole`, what is left of it is told.
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
        """Whatever is kept under these ids, and any copy that comes later. Raises as `put`."""
        if self.enabled:
            await self.put(tenant, [Record(id_, b"", DELETED) for id_ in ids if is_id(id_)])

    async def _put_shared(self, tenant: str, records: Sequence[Record]) -> tuple[int, bool]:
        """The epoch of Redis in which there is no more to bring, 0 for none; whether it took all.

        Raises ConversationTooLarge.
        """
        redis = self._redis
        if redis is None:
            return 0, False
        epoch = redis.epoch  # as before: if Redis is emptied now, they are brought again
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
        """Whether the disk took them. What need not be `certain` is not waited for."""
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
        """Looks again and again, in the epoch that `look` is told, until it is sure.

        Returns what was known then; nothing where that does not matter.
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
                    "What was kept is being brought back and is not all there yet: try again."
                )
            await asyncio.sleep(_RETRY_INTERVAL_S)

    async def _get_once(self, tenant: str, ids: Sequence[str]) -> tuple[dict[str, Copy], bool]:
        """From Redis, then from the disk, each of which gets what it lacks; whether Redis answered,
        if there is one."""
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
        # What may have changed since, or was let go by Redis, is nothing to go by.
        found = [each for each in await self._read_disk(tenant, missing) if each.version >= FINAL]
        alone = [each for each in found if not each.group]
        with contextlib.suppress(RedisDown, ConversationTooLarge):
            if alone:
                await redis.run(lambda shared: shared.put(tenant, alone), "put")
        return copies | {each.id: Copy(each, 0) for each in found}, answered

    async def _members_once(
        self, tenant: str, group: str, after: int, limit: int
    ) -> tuple[list[Record], list[int], int]:
        """And the epochs that what the group is called by, and they, were put in: -1 where some are
        missing; and when it began. Raises RedisAway."""
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
        if lost:  # it has a policy for its memory that lets keys go
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
        """Raises ConversationsUnavailable if it is, and there is no Redis."""
        try:
            yield
        except DiskUnavailable:
            if self._redis is None:
                raise _unavailable_error() from None


class _Certainty(Enum):
    """When what was found is all there is."""

    ALWAYS = auto()
    UNLESS_LOST = auto()  # if Redis has lost nothing of this epoch
    IF_SETTLED = auto()
    NEVER = auto()


def _to_live_record(copy: Copy | None, state: RedisState) -> Record | None:
    if copy is None or not copy.record.data:
        return None
    record = copy.record
    is_restored = copy.may_change and copy.epoch != state.epoch
    return None if is_restored and not record.group and record.order < state.lost else record


def _eviction_error() -> ConversationsUnavailable:
    return ConversationsUnavailable(
        "Room is being made for what this tenant wants to be kept: try again."
    )


def _unavailable_error() -> ConversationsUnavailable:
    return ConversationsUnavailable("Conversations cannot be read or kept now: try again.")


def _remove_files(folder: Path) -> None:
    """What was kept before the operator turned it off."""
    for end in ("", "-wal", "-shm"):
        try:
            (folder / f"{FILE}{end}").unlink(missing_ok=True)
        except OSError as error:
            log.error("%s%s is still there: %s", folder / FILE, end, error)
