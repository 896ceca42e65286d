"""Registry of adapter names and their versions, and the protocol of the store that has the records.

Requests read a `Snapshot`. A snapshot is immutable: when a record changes, a new snapshot replaces
it. `Registry` makes the changes. Each change is one atomic change of one record in the store, so
changes that other processes make at the same time are never lost.

See decisions 021 and 061 in docs/decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Protocol

from adapters.adapter import Converted
from adapters.chat_template import ChatTemplate
from adapters.errors import BaseMismatch, InvalidName, UnknownAdapter, UnknownVersion
from adapters.record import (
    DeclaredContent,
    Record,
    Version,
    check_name,
    draw_task_id,
    split_selector,
)

Change = Callable[[Record | None], Record]
_LATER_S = 0.001


class Store(Protocol):
    """Storage of converted adapters by digest, and of records by name.

    Methods raise subclasses of `StoreError`.
    """

    async def get(self, digest: str) -> Converted:
        """Return the tensors with this digest, after verifying them.

        Raise `VersionUnavailable` if there is no intact copy of the tensors, and `StoreUnavailable`
        if the storage does not respond.
        """

    async def put(self, converted: Converted) -> None:
        """Store the tensors durably. If the digest is already stored, do nothing."""

    async def records(self) -> Mapping[str, Record]:
        """Return all records by name, including the records of removed names.

        The result includes every change that was made through this object.
        """

    async def change(self, name: str, change: Change) -> Record:
        """Replace a record by ``change(record)`` atomically, and return the new record.

        The function `change` gets None if the name has no record. If another process changes the
        record during the call, the store calls `change` again with the other process's record. If
        `change` raises an exception, or returns an equal record, nothing is written. The exception
        is passed on. If this method raises an error other than `ChangeUnknown`, the stored record
        has not changed.
        """


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All registered adapters, by name, at the time when the snapshot was made."""

    records: Mapping[str, Record] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def of(cls, records: Iterable[Record]) -> Snapshot:
        live = {record.name: record for record in records if not record.is_removed}
        return cls(MappingProxyType(live))

    def resolve(self, model: str) -> Version:
        """Return the version that a model name, ``NAME`` or ``NAME@DIGEST``, selects.

        Raise `UnknownAdapter` if NAME is not registered. Raise `UnknownVersion` if NAME has no
        version with this digest. Raise `InvalidName` if DIGEST is malformed.
        """
        name, digest = split_selector(model)
        record = self.record(name)
        return record.version if digest is None else record.find(digest)

    def record(self, name: str) -> Record:
        record = self.records.get(name)
        if record is None:
            raise UnknownAdapter("model", "name", name, "a registered adapter")
        return record


class Registry:
    """Registry of adapter names.

    `snapshot` has the current records, including each change that was made through this object.
    When another process has changed a record, the store calls `refresh` with all records.
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self.snapshot = Snapshot()

    def refresh(self, records: Mapping[str, Record]) -> None:
        """Replace the snapshot with all records of the store."""
        self.snapshot = Snapshot.of(records.values())

    async def load(self) -> None:
        self.refresh(await self._store.records())

    async def add(
        self,
        name: str,
        base: str,
        converted: Converted,
        source: str,
        chat_template: ChatTemplate | None = None,
        added_by: str | None = None,
        *,
        declared: bool = False,
    ) -> Record:
        """Serve this adapter under `name`, and return the record.

        If no version of the name has these weights and this chat template, add a new version.

        Set `declared` if the configuration file specifies the adapter. `Record.declared` stores
        which version the file specified last. If the version exists already, it is served only if
        `Record.declared` has another version, which means that the file or its source has changed.
        Otherwise the served version stays as it is, because an admin may have rolled back.
        """
        check_name(name)
        _check_base(name, base, self.snapshot.records.get(name))
        now = self._clock()
        if declared:
            digest = chat_template.digest(converted.digest) if chat_template else converted.digest
            with suppress(UnknownAdapter, UnknownVersion):
                return await self._change(name, partial(_declare, name, base, digest, now))
        await self._store.put(converted)
        task_id = self._task_id(converted.digest)
        version = Version.of(converted, base, now, source, task_id, chat_template, added_by)

        def add(record: Record | None) -> Record:
            if record is None or record.is_removed:
                life, revision = (record.life, record.revision) if record else (0, 0)
                return Record(
                    name=name,
                    life=life + 1,
                    revision=revision + 1,
                    updated=now,
                    served=version.digest,
                    versions=(version,),
                    declared=DeclaredContent(revision + 1, version.digest) if declared else None,
                    before=(),
                )
            _check_base(name, base, record)
            known = any(old.digest == version.digest for old in record.versions)
            if declared and known:
                return _declare(name, base, version.digest, now, record)
            if record.served == version.digest:
                return record
            if not known:
                # Choose a time after the creation of the last version, even if this machine's clock
                # is behind. Otherwise the new version would not be sorted last.
                created = max(now, record.versions[-1].created + _LATER_S)
                added = replace(version, created=created)
                record = replace(record, versions=(*record.versions, added))
            changed = record.with_served(version.digest, now)
            if declared:
                changed = replace(
                    changed, declared=DeclaredContent(changed.revision, version.digest)
                )
            return changed

        return await self._change(name, add)

    async def rollback(self, name: str, digest: str | None = None) -> Record:
        """Serve an earlier version, and return the record.

        Without `digest`, serve the version that was served before the current version. Another
        rollback without `digest` goes back one version further.
        """
        now = self._clock()

        def rollback(record: Record | None) -> Record:
            known = _require_live(name, record)
            target = _previous_digest(known) if digest is None else known.find(digest).digest
            return known if target == known.served else known.with_rollback(target, now)

        return await self._change(name, rollback)

    async def remove(self, name: str) -> Record:
        """Remove the name and its versions, and return the record.

        Requests that have already resolved a version continue.
        """
        now = self._clock()

        def remove(record: Record | None) -> Record:
            known = _require_live(name, record)
            revision = known.revision + 1
            gone = replace(known, served="", versions=(), declared=None, before=None)
            return replace(gone, revision=revision, updated=now)

        return await self._change(name, remove)

    async def _change(self, name: str, change: Change) -> Record:
        try:
            check_name(name)
        except InvalidName:
            raise UnknownAdapter("adapter", "name", name, "a registered adapter") from None
        record = await self._store.change(name, change)
        await self.load()
        return record

    def _task_id(self, weights: str) -> int:
        """Return the task id for weights with this digest.

        If a version of any name has the same weights, return its id, so that engines cache the
        weights only once. Otherwise return a new id.
        """
        for record in self.snapshot.records.values():
            for version in record.versions:
                if version.weights == weights:
                    return version.task_id
        return draw_task_id()


def _require_live(name: str, record: Record | None) -> Record:
    if record is None or record.is_removed:
        raise UnknownAdapter("adapter", "name", name, "a registered adapter")
    return record


def _declare(name: str, base: str, digest: str, now: float, record: Record | None) -> Record:
    """Return the record after the configuration file has specified the version `digest`.

    If the file specified another version before, the result serves the version `digest`. Raise
    `UnknownAdapter` if the name is not registered. Raise `UnknownVersion` if the version does not
    exist.
    """
    known = _require_live(name, record)
    known.find(digest)
    _check_base(name, base, known)
    last = known.declared
    if last is not None and last.digest == digest:
        return known
    # Do not change the served version if the file specifies this name for the first time: an admin
    # may have chosen the version.
    served = known.served if last is None else digest
    changed = known.with_served(served, now)
    return replace(changed, declared=DeclaredContent(changed.revision, digest))


def _check_base(name: str, base: str, record: Record | None) -> None:
    if record is not None and not record.is_removed and record.version.base != base:
        why = "remove the name first"
        raise BaseMismatch(name, "base", base, record.version.base, why)


def _previous_digest(record: Record) -> str:
    if not record.earlier:
        known = ", ".join(version.short_digest for version in record.versions)
        served = record.served[:12]
        raise UnknownVersion(
            *(record.name, "version", f"before {served}", known),
            says=f"no version was served before {served}, which is served now; name one of its "
            f"versions ({known}), or add another one first",
        )
    return record.earlier[-1]
