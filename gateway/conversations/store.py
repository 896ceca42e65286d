"""Responses and conversations of tenants, kept on this gateway's disk.

Everything is keyed by its tenant: the id of another's record is simply not found.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from gateway.conversations.disk import FILE, ConversationDisk
from gateway.conversations.disk_thread import DiskAway, DiskThread
from gateway.conversations.record import DELETED, Record, checked, is_id
from gateway.conversations.stats import Stats
from gateway.errors import ConversationsOff, ConversationsUnavailable

log = logging.getLogger(__name__)

_TIDY_S = 5.0
_STEP_S = 0.01
_RENEW_S = 3600.0  # and a tenth of the time to live at most
_STEPS = 64  # for which one put waits until there is room


class Conversations:
    """Use as an async context manager, with `follow` running inside."""

    def __init__(
        self, folder: Path, *, ttl_s: int, tenant_bytes: int, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` gives seconds of 1970."""
        self.enabled = ttl_s > 0
        self.stats = Stats()
        self._folder = folder
        make = partial(
            ConversationDisk,
            folder,
            ttl_ms=ttl_s * 1000,
            tenant_bytes=tenant_bytes,
            renew_ms=int(min(ttl_s / 10, _RENEW_S) * 1000),
            clock=clock,
        )
        self._disk = DiskThread(folder, make, self.stats)

    async def __aenter__(self) -> Conversations:
        if self.enabled:
            await self._disk.open()
        else:
            await asyncio.to_thread(_remove, self._folder)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._disk.close()

    async def follow(self) -> None:
        """Removes what has expired, in small steps; until cancelled."""
        while self.enabled:
            more = False
            try:
                more = await self._disk.run(ConversationDisk.tidy)
                used = await self._disk.run(ConversationDisk.usage)
                self.stats.bytes, self.stats.records = used
            except DiskAway:
                pass
            except Exception:  # a mistake of ours; the gateway goes on without this
                log.exception("conversations are not looked after")
            await asyncio.sleep(_STEP_S if more else _TIDY_S)

    async def put(self, tenant: str, records: Sequence[Record]) -> None:
        """Keeps all of them, or none; of each the highest version that there is.

        Raises ConversationsOff, ConversationTooLarge and ConversationsUnavailable.
        """
        if not self.enabled:
            raise ConversationsOff
        records = [checked(record) for record in records]
        try:
            for _ in range(_STEPS):
                put = await self._disk.run(lambda disk: disk.put(tenant, records))
                self.stats.evicted += put.evicted
                if put.done:
                    return
        except DiskAway:
            raise _unavailable() from None
        raise ConversationsUnavailable(
            "Room is being made for what this tenant wants to be kept: try again."
        )

    async def get(self, tenant: str, ids: Sequence[str]) -> list[Record | None]:
        """What is kept under these ids, in their order. Its time to live begins anew.

        Raises ConversationsUnavailable, and ConversationTooLarge for more than `MAX_READ` bytes.
        """
        wanted = [id_ for id_ in dict.fromkeys(ids) if is_id(id_)]
        if not self.enabled or not wanted:
            return [None] * len(ids)
        try:
            kept = await self._disk.run(lambda disk: disk.get(tenant, wanted))
        except DiskAway:
            raise _unavailable() from None
        found = {each.record.id: each.record for each in kept if each.record.data}
        return [found.get(id_) for id_ in ids]

    async def members(
        self, tenant: str, group: str, *, after: int = -1, limit: int = 1000
    ) -> list[Record]:
        """The first `limit` records of a group behind the place `after`, by order.

        Raises as `get`.
        """
        if not self.enabled or not is_id(group):
            return []
        try:
            kept = await self._disk.run(lambda disk: disk.members(tenant, group, after, limit))
        except DiskAway:
            raise _unavailable() from None
        return [each.record for each in kept if each.record.data]

    async def delete(self, tenant: str, ids: Sequence[str]) -> None:
        """Whatever is kept under these ids, and any copy that comes later. Raises as `put`."""
        if self.enabled:
            await self.put(tenant, [Record(id_, b"", DELETED) for id_ in ids if is_id(id_)])


def _unavailable() -> ConversationsUnavailable:
    return ConversationsUnavailable("Conversations cannot be read or kept now: try again.")


def _remove(folder: Path) -> None:
    """What was kept before the operator turned it off."""
    for end in ("", "-wal", "-shm"):
        try:
            (folder / f"{FILE}{end}").unlink(missing_ok=True)
        except OSError as error:
            log.error("%s%s is still there: %s", folder / FILE, end, error)
