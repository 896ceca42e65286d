"""Asynchronous access to the API keys that admins created over the API ("issued keys")."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from gateway.errors import KeysUnavailable
from gateway.tenancy.access import Access
from gateway.tenancy.keys.copies import KeyCopies
from gateway.tenancy.keys.record import KeyRecord, Uses, merge_uses
from lora_store.primary import describe

log = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_INTERVAL_S = 0.5
_USES_INTERVAL_S = 60.0


class IssuedKeys:
    """Store of the issued keys. After each change, the keys are passed to `access`.

    Use an instance as an async context manager. While the context is open, `follow` must run in a
    task. Methods raise KeysUnavailable if Redis or the disk fails.
    """

    def __init__(self, copies: KeyCopies, access: Access) -> None:
        self._copies = copies
        self._access = access
        self._failure: str | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="keys")

    async def __aenter__(self) -> IssuedKeys:
        await self._poll()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._put_uses()
        await asyncio.to_thread(self._thread.shutdown)
        self._copies.close()

    async def follow(self) -> None:
        """Poll for keys that other processes have created or revoked. Run until cancelled.

        A change is applied within a second.
        """
        told = time.monotonic()
        while True:
            await asyncio.sleep(_POLL_INTERVAL_S)
            await self._poll()
            if time.monotonic() - told >= _USES_INTERVAL_S:
                told = time.monotonic()
                await self._put_uses()

    @property
    def problem(self) -> str:
        """Error text if issued keys cannot be read or may be out of date, else ""."""
        if self._failure is None:
            return ""
        taken = "kept current" if self._copies.trusted else "taken yet"
        return f"keys made over the API are not {taken}: {self._failure}"

    @property
    def disk_problem(self) -> str:
        """Error text while a corrupt file ``keys.broken`` exists on the disk, else ""."""
        return self._copies.disk_problem

    @property
    def records(self) -> list[KeyRecord]:
        """Records of keys that are not revoked, the oldest key first.

        Raises KeysUnavailable until the keys are loaded.
        """
        if not self._copies.trusted:
            raise KeysUnavailable("Keys cannot be read now: Redis has not answered yet. Try again.")
        live = [record for record in self._copies.records.values() if record.revoked is None]
        return sorted(live, key=lambda record: (record.created, record.id))

    def find(self, key_id: str) -> KeyRecord | None:
        """Return the record of a key. Return None if the key is unknown or revoked."""
        record = self._copies.records.get(key_id)
        return None if record is None or record.revoked is not None else record

    async def uses(self) -> Uses:
        return merge_uses(await self._run(self._copies.uses), self._access.uses)

    async def add(self, record: KeyRecord) -> None:
        """Add a key. It is valid in this process at once, and in all others within a second."""
        await self._run(partial(self._copies.add, record))

    async def revoke(self, key_id: str) -> None:
        """Revoke a key. Do nothing if the key is revoked already.

        Raises:
            KeyNotFound: the id is unknown.
            KeysUnavailable: Redis or the disk fails; `KeyCopies.revoke` describes the consequences.
        """
        await self._run(partial(self._copies.revoke, key_id, int(time.time())))

    async def _poll(self) -> None:
        failure = None
        try:
            await self._run(self._copies.poll)
        except KeysUnavailable as error:
            cause = error.__cause__
            failure = str(cause) if isinstance(cause, OSError) else describe(cause)
        if failure == self._failure:
            return
        self._failure = failure
        if failure is None:
            log.info("keys made over the API are up to date again")
        elif self._copies.trusted:
            log.warning("keys made over the API are not up to date: %s", failure)
        else:
            log.warning("KEYS MADE OVER THE API ARE NOT TAKEN YET: %s", failure)

    async def _put_uses(self) -> None:
        if uses := self._access.take_uses():
            try:
                await self._run(partial(self._copies.put_uses, uses))
            except KeysUnavailable:
                # Restore the uses, so that the next call stores them.
                self._access.uses = merge_uses(uses, self._access.uses)

    async def _run(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work)
        except OSError as error:
            raise KeysUnavailable(
                "Keys cannot be read or changed now: this gateway's own copy of them fails."
            ) from error
        finally:
            if self._copies.trusted:
                self._access.set_issued_keys(self._copies.records)
