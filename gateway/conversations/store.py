"""Responses and conversations of tenants, kept in Redis and on this gateway's disk.

Everything is keyed by its tenant: the id of another's record is simply not found. What either copy
took is kept: a disk brings to Redis what that lacks (`upkeep`), and what is read from Redis is put
on this disk, so that it outlives the gateway that wrote it. While something is still to be brought,
by whichever gateway, what is not found is not called lost: it is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from gateway.conversations.disk import FILE, ConversationDisk
from gateway.conversations.disk_thread import DiskAway, DiskThread
from gateway.conversations.record import DELETED, MAX_READ, Record, checked, is_id
from gateway.conversations.redis_threads import RedisAway, RedisThreads
from gateway.conversations.shared import SharedConversations
from gateway.conversations.stats import Stats
from gateway.conversations.upkeep import Upkeep
from gateway.errors import ConversationsOff, ConversationsUnavailable, ConversationTooLarge

log = logging.getLogger(__name__)

_RENEW_S = 3600.0  # and a tenth of the time to live at most
_STEPS = 64  # for which one put waits until there is room
_BROUGHT_S = 5.0  # for which one that is not found is waited for
_AGAIN_S = 0.2
_REDIS_S = 2.0  # of one call at least; the values are large, and Redis forks for its snapshots


class Conversations:
    """Use as an async context manager, with `follow` running inside."""

    def __init__(
        self,
        folder: Path,
        redis_url: str | None = None,
        *,
        ttl_s: int,
        tenant_bytes: int,
        redis_timeout_s: float = _REDIS_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`redis_url` in a form of `lora_store.redis_url`; `clock` gives seconds of 1970."""
        self.enabled = ttl_s > 0
        self.stats = Stats()
        self._folder = folder
        bounds = {
            "ttl_ms": ttl_s * 1000,
            "tenant_bytes": tenant_bytes,
            "renew_ms": int(min(ttl_s / 10, _RENEW_S) * 1000),
        }
        make = partial(ConversationDisk, folder, **bounds, clock=clock)
        self._disk = DiskThread(folder, make, self.stats)
        self._redis: RedisThreads | None = None
        if redis_url is not None:
            timeout_s = max(_REDIS_S, redis_timeout_s)
            shared = SharedConversations(
                redis_url, timeout_s=timeout_s, **bounds, on_refused=self.stats.count_refused
            )
            self._redis = RedisThreads(shared, self.stats)
        self._upkeep = Upkeep(folder, self._disk, self._redis, self.stats)

    async def __aenter__(self) -> Conversations:
        if self.enabled:
            await self._disk.open()
            await self._upkeep.first_look()
        else:
            await asyncio.to_thread(_remove, self._folder)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._redis is not None:
            await self._redis.close()
        await self._disk.close()
        self._upkeep.close()

    async def follow(self) -> None:
        """Until cancelled."""
        if self.enabled:
            await self._upkeep.follow()

    async def put(self, tenant: str, records: Sequence[Record]) -> None:
        """Keeps all of them, or none; of each the highest version that there is.

        Raises ConversationsOff, ConversationTooLarge and ConversationsUnavailable.
        """
        if not self.enabled:
            raise ConversationsOff
        records = [checked(record) for record in records]
        if (size := sum(len(record.data) for record in records)) > MAX_READ:
            raise ConversationTooLarge(f"{size} bytes are too much to be kept at once.")
        if records:
            epoch, taken = await self._put_shared(tenant, records)
            if not await self._put_disk(tenant, records, epoch, certain=not taken) and not taken:
                raise _unavailable()

    async def get(self, tenant: str, ids: Sequence[str]) -> list[Record | None]:
        """What is kept under these ids, in their order. Its time to live begins anew.

        Raises ConversationsUnavailable, and ConversationTooLarge for more than `MAX_READ` bytes.
        """
        wanted = [id_ for id_ in dict.fromkeys(ids) if is_id(id_)]
        found: dict[str, Record] = {}

        async def look() -> bool:
            missing = [id_ for id_ in wanted if id_ not in found]
            found.update(await self._get_once(tenant, missing))
            return len(found) == len(wanted)

        if self.enabled and wanted:
            await self._until_settled(look)
        return [_live(found.get(id_)) for id_ in ids]

    async def members(
        self, tenant: str, group: str, *, after: int = -1, limit: int = 1000
    ) -> list[Record]:
        """The first `limit` records of a group behind the place `after`, by order.

        Raises as `get`.
        """
        found: dict[str, Record] = {}

        async def look() -> bool:
            found.update(await self._members_once(tenant, group, after, limit))
            return False  # there may always be one more elsewhere

        if self.enabled and is_id(group):
            await self._until_settled(look)
        members = [each for each in found.values() if each.data and each.group == group]
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
            for _ in range(_STEPS):
                put = await redis.run(lambda shared: shared.put(tenant, records))
                self.stats.evicted += put.evicted
                if put.done:
                    return epoch, put.taken
        except RedisAway:
            await self._upkeep.refused()
            return 0, False
        raise _no_room()

    async def _put_disk(
        self, tenant: str, records: Sequence[Record], epoch: int, *, certain: bool = False
    ) -> bool:
        """Whether the disk took them. What need not be `certain` is not waited for."""
        try:
            for _ in range(_STEPS if certain else 1):
                put = await self._disk.run(lambda disk: disk.put(tenant, records, epoch))
                self.stats.evicted += put.evicted
                if put.done:
                    return True
        except DiskAway:
            return False
        except ConversationTooLarge:
            if certain:
                raise
            return False
        if certain:
            raise _no_room()
        return False

    async def _until_settled(self, look: Callable[[], Awaitable[bool]]) -> None:
        """Looks again and again until all is found, or what is not is nowhere."""
        redis = self._redis
        loop = asyncio.get_running_loop()
        until = loop.time() + _BROUGHT_S
        while True:
            epoch = 0 if redis is None else redis.epoch
            if await look() or redis is None:
                return
            with contextlib.suppress(RedisAway):
                if redis.up and await redis.look() == (epoch, True):
                    return
            if not redis.up:
                raise _unavailable()
            if loop.time() >= until:
                raise ConversationsUnavailable(
                    "What was kept is being brought back and is not all there yet: try again."
                )
            await asyncio.sleep(_AGAIN_S)

    async def _get_once(self, tenant: str, ids: Sequence[str]) -> dict[str, Record]:
        """From Redis, then from the disk; each gets what it lacks."""
        shared: dict[str, Record] = {}
        with contextlib.suppress(RedisAway):
            if self._redis is not None:
                epoch = self._redis.epoch
                shared = await self._redis.run(lambda redis: redis.get(tenant, ids))
                if shared:
                    await self._put_disk(tenant, list(shared.values()), epoch)
        missing = [id_ for id_ in ids if id_ not in shared]
        return shared | (await self._from_disk(tenant, missing) if missing else {})

    async def _members_once(
        self, tenant: str, group: str, after: int, limit: int
    ) -> dict[str, Record]:
        ids: list[str] = []
        shared: dict[str, Record] = {}
        with contextlib.suppress(RedisAway):
            if self._redis is not None:
                epoch = self._redis.epoch
                ids, shared = await self._redis.run(
                    lambda redis: redis.members(tenant, group, after, limit)
                )
                if shared:
                    await self._put_disk(tenant, list(shared.values()), epoch)
        with self._disk_may_be_away():
            ids += await self._disk.run(lambda disk: disk.members(tenant, group, after, limit))
        # Those that only the disk has may have been deleted elsewhere.
        rest = [id_ for id_ in dict.fromkeys(ids) if id_ not in shared]
        return shared | (await self._get_once(tenant, rest) if rest else {})

    async def _from_disk(self, tenant: str, ids: Sequence[str]) -> dict[str, Record]:
        """What Redis lacks; from now on it has it, whatever had become of its copy."""
        found: list[Record] = []
        with self._disk_may_be_away():
            kept = await self._disk.run(lambda disk: disk.get(tenant, ids))
            found = [each.record for each in kept]
        with contextlib.suppress(RedisAway, ConversationTooLarge):
            if found and self._redis is not None:
                await self._redis.run(lambda redis: redis.put(tenant, found))
        return {record.id: record for record in found}

    @contextlib.contextmanager
    def _disk_may_be_away(self) -> Iterator[None]:
        """Raises ConversationsUnavailable if it is, and there is no Redis."""
        try:
            yield
        except DiskAway:
            if self._redis is None:
                raise _unavailable() from None


def _live(record: Record | None) -> Record | None:
    return record if record is not None and record.data else None


def _no_room() -> ConversationsUnavailable:
    return ConversationsUnavailable(
        "Room is being made for what this tenant wants to be kept: try again."
    )


def _unavailable() -> ConversationsUnavailable:
    return ConversationsUnavailable("Conversations cannot be read or kept now: try again.")


def _remove(folder: Path) -> None:
    """What was kept before the operator turned it off."""
    for end in ("", "-wal", "-shm"):
        try:
            (folder / f"{FILE}{end}").unlink(missing_ok=True)
        except OSError as error:
            log.error("%s%s is still there: %s", folder / FILE, end, error)
