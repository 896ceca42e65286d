"""The API keys that admins created over the API ("issued keys"), in memory and in the database."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from gateway.database.changes import POLL_INTERVAL_S
from gateway.database.database import Database
from gateway.database.sharing import Sharing
from gateway.errors import DatabaseUnavailable, KeyNotFound
from gateway.tenancy.access import Access
from gateway.tenancy.keys.record import KeyRecord, Uses, join_records, merge_uses
from gateway.tenancy.keys.rows import (
    insert_keys,
    read_changed,
    read_uses,
    revoke_keys,
    write_uses,
)
from gateway.troubles import Troubles

_USES_INTERVAL_S = 60.0
_ONLY_HERE = (
    "The key is revoked in the process that answers this. Other processes and gateways accept it "
    "until the database answers again, and for good if this process ends before: try again."
)


class IssuedKeys:
    """The issued keys. After each change, they are passed to `access`.

    A process accepts the keys that it has loaded even while the database is unavailable. The
    methods raise DatabaseUnavailable then.
    """

    def __init__(
        self,
        database: Database,
        sharing: Sharing,
        access: Access,
        before_first: Callable[[], Awaitable[None]],
    ) -> None:
        """Create the object without keys. `refresh` loads them.

        `before_first` is awaited before the keys are loaded first. It raises DatabaseUnavailable if
        the database does not have all keys yet.
        """
        self._database = database
        self._sharing = sharing
        self._access = access
        self._before_first = before_first
        self._records: dict[str, KeyRecord] | None = None
        """All keys by id, including revoked ones; None until they are loaded."""
        self._change = 0
        """The change number up to which `_records` is complete."""
        self._unwritten: dict[str, int] = {}
        """Revocations that the database does not have yet: times by id, as in `revoke_keys`."""
        self._uses_written_at = time.monotonic()
        self._why_not_loaded = ""

    async def close(self) -> None:
        """Write what the database does not have yet, if it is available."""
        with suppress(DatabaseUnavailable):
            await self._maintain(writes_uses=True)

    async def refresh(self, change: int, must_reload: bool) -> None:
        """Load the keys that have changed. This is a `Refresh` function of a `ChangeFeed`."""
        try:
            if self._records is None:
                await self._before_first()
            after = 0 if must_reload else self._change
            changed = await self._database.read(partial(read_changed, after=after))
        except DatabaseUnavailable as error:
            self._why_not_loaded = error.why
            raise
        if must_reload:
            self._replace(changed)
        else:
            self._apply(changed)
        self._change = change

    def _replace(self, found: Sequence[KeyRecord]) -> None:
        """Replace all records. Revoke again what an older backup of the database has not revoked.

        Its admins did not mean to make these keys valid again.
        """
        known, self._records = self._records or {}, {}
        for record in found:
            mine = known.get(record.id)
            if mine is not None and mine.revoked is not None and record.revoked is None:
                self._unwritten.setdefault(record.id, mine.revoked)
        self._apply(found)

    async def follow(self, troubles: Troubles) -> None:
        """Write revocations that the database could not store, and times of use, until cancelled.

        Times of use are written once a minute.
        """
        while True:
            await asyncio.sleep(POLL_INTERVAL_S)
            try:
                with suppress(DatabaseUnavailable):
                    await self._maintain()
            except Exception as error:  # continue after any error
                text = f"changes of keys are not written: {type(error).__name__}"
                troubles.hold("keys_unwritten", logging.ERROR, text, exc_info=True)
            else:
                troubles.clear("keys_unwritten")

    async def _maintain(self, *, writes_uses: bool = False) -> None:
        if self._unwritten:
            await self._write_revocations()
        if writes_uses or time.monotonic() - self._uses_written_at >= _USES_INTERVAL_S:
            self._uses_written_at = time.monotonic()
            await self._write_uses()

    @property
    def problem(self) -> str:
        """Text for operators until the keys are loaded; then empty."""
        if self._records is not None:
            return ""
        why = self._why_not_loaded or self._database.problem
        return f"keys made over the API are not accepted yet: {why}"

    @property
    def records(self) -> list[KeyRecord]:
        """Records of keys that are not revoked, the oldest key first.

        Raise DatabaseUnavailable until the keys are loaded.
        """
        if self._records is None:
            raise DatabaseUnavailable("keys are not loaded yet")
        live = [record for record in self._records.values() if record.revoked is None]
        return sorted(live, key=lambda record: (record.created, record.id))

    def find(self, key_id: str) -> KeyRecord | None:
        """Return the record of a key. Return None if the key is unknown or revoked."""
        record = (self._records or {}).get(key_id)
        return None if record is None or record.revoked is not None else record

    async def uses(self) -> Uses:
        """Return when each key was last used, in seconds since 1970, by id.

        While the database is unavailable, return only what this process knows.
        """
        stored: Uses = {}
        with suppress(DatabaseUnavailable):
            stored = await self._database.read(read_uses)
        return merge_uses(stored, self._access.uses)

    async def add(self, record: KeyRecord) -> None:
        """Add a key. It is valid in this process at once, and in all others within a second.

        Raise SwitchedOff if other gateways would not accept the key.
        """
        self._sharing.require("Creating keys")
        if self._records is None:
            raise DatabaseUnavailable("keys are not loaded yet")
        await self._database.write(partial(insert_keys, records=[record]))
        self._apply([record])

    async def revoke(self, key_id: str) -> None:
        """Revoke a key. Do nothing if the key is revoked already.

        Raises:
            KeyNotFound: The id is unknown.
            DatabaseUnavailable: The key is revoked in this process, and elsewhere as soon as the
                database answers again.
            SwitchedOff: The key is revoked at this gateway, but each gateway has a database of its
                own.
        """
        if key_id not in (self._records or {}):
            await self.refresh(self._change, False)  # another process may have added the key
        record = (self._records or {}).get(key_id)
        if record is None:
            raise KeyNotFound(key_id)
        if record.revoked is not None and key_id not in self._unwritten:
            return
        # Revoke the key in this process first: it must be revoked even if the database fails.
        self._unwritten.setdefault(key_id, int(time.time()))
        self._apply([])
        try:
            await self._write_revocations()
        except DatabaseUnavailable as error:
            raise DatabaseUnavailable(error.why, _ONLY_HERE) from error
        self._sharing.require("The key is revoked at this gateway only. Revoking it at all of them")

    def _apply(self, changed: Sequence[KeyRecord]) -> None:
        """Add or replace records. A revoked key stays revoked: the database may not know it yet."""
        records = join_records(self._records or {}, changed)
        for key_id, when in self._unwritten.items():
            if key_id in records:
                records[key_id] = records[key_id].model_copy(update={"revoked": when})
        self._records = records
        self._access.set_issued_keys(self._records)

    async def _write_revocations(self) -> None:
        pending = dict(self._unwritten)
        await self._database.write(partial(revoke_keys, revoked=pending))
        for key_id in pending:
            self._unwritten.pop(key_id, None)

    async def _write_uses(self) -> None:
        if uses := self._access.take_uses():
            try:
                await self._database.write(partial(write_uses, uses=uses))
            except DatabaseUnavailable:
                # Restore the uses, so that the next call stores them.
                self._access.uses = merge_uses(uses, self._access.uses)
