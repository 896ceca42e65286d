"""Functions that merge the adapter records on disk and in Redis, and that change a record.

The functions also merge the records in this process' memory, which the argument `known` passes.
These records may have a change that is missing on disk and in Redis. For example, the disk was full
when Redis stored the change, and later Redis lost its data. The functions block on I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

from adapters.errors import StoreError, StoreUnavailable, WritesRefused
from adapters.record import Record, merge
from adapters.registry import Change
from lora_store.disk import Disk
from lora_store.redis import Position, RedisTier

_SWAP_TRIES = 50


@dataclass(frozen=True, slots=True)
class SyncResult:
    """Result of `sync`, which merges the records in memory, on disk and in Redis.

    Attributes:
        records: the merged records, by name.
        position: the result of `RedisTier.position` before merging; None without Redis.
        unwritten: errors of the records that could not be written to this disk, by record name.
        unreadable: names of records in Redis that this release cannot parse.
        unshared: names of records that are missing or old in Redis, because Redis refused writes.
        refusal: the error with which Redis refused writes; None if Redis did not refuse writes.
    """

    records: dict[str, Record]
    position: Position | None
    unwritten: dict[str, OSError]
    unreadable: frozenset[str]
    unshared: set[str]
    refusal: StoreError | None


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """Result of a change of a record.

    Attributes:
        record: the changed record.
        shared: True if Redis has the changed record.
        redis_error: error after which Redis may or may not have stored the record; None without
            such an error.
        disk_error: error with which this disk failed to store the record; None if it succeeded.
    """

    record: Record
    shared: bool = False
    redis_error: StoreUnavailable | None = None
    disk_error: OSError | None = None


def sync(disk: Disk, redis: RedisTier | None, known: Mapping[str, Record]) -> SyncResult:
    """Merge all adapter records from the disk, Redis and this process' memory (`known`).

    The merged records are written to disk and Redis.

    A record in Redis that cannot be parsed is left unchanged, because a newer release may have
    written it.
    """
    with disk.lock():
        local = disk.records()
        position, stored = redis.records(local) if redis is not None else (None, {})
        unreadable = frozenset(name for name, found in stored.items() if found.record is None)
        records: dict[str, Record] = {}
        unwritten: dict[str, OSError] = {}
        unshared: set[str] = set()
        refusal: StoreError | None = None
        for name in sorted(local.keys() | stored.keys() | known.keys()):
            found = stored.get(name)
            shared = found.record if found is not None else None
            record = _join(local.get(name), shared, known.get(name))
            if record is None:
                continue
            records[name] = record
            if record != local.get(name) and (error := _write(disk, record)) is not None:
                unwritten[name] = error
            if redis is None or record == shared or name in unreadable:
                continue
            try:
                if refusal is None:
                    # Ignore the result of `swap`. If another process has changed the record first,
                    # that process also publishes a notice, which starts another sync here.
                    redis.swap(found, record)
            except WritesRefused as error:
                refusal = error
            if refusal is not None:
                unshared.add(name)
    return SyncResult(records, position, unwritten, unreadable, unshared, refusal)


def change(
    disk: Disk, redis: RedisTier | None, name: str, change: Change, known: Record | None
) -> ChangeResult:
    """Change one record atomically.

    With Redis, the change succeeds if Redis has stored the record, even if this disk cannot store
    it. Without Redis, the change succeeds if the disk has stored the record. If an exception is
    raised, nothing was changed. A record in Redis that cannot be parsed is replaced, because an
    admin has explicitly requested this change.

    Args:
        disk: the disk.
        redis: the Redis tier; None without Redis.
        name: name of the record.
        change: returns the new record, given the current record or None.
        known: the record in this process' memory, if any.
    """
    with disk.lock():
        for _ in range(_SWAP_TRIES):
            stored = redis.record(name) if redis is not None else None
            shared = stored.record if stored is not None else None
            current = _join(disk.record(name), shared, known)
            record = change(current)
            if record == current:
                return ChangeResult(record, shared=record == shared)
            if redis is None:
                disk.put_record(record)
                return ChangeResult(record)
            try:
                if not redis.swap(stored, record):
                    continue
            except StoreUnavailable as error:
                # Do not retry, because Redis may have stored the record before it failed. If Redis
                # lacks the record, the next sync copies it from the disk to Redis.
                return ChangeResult(record, redis_error=error, disk_error=_write(disk, record))
            return ChangeResult(record, shared=True, disk_error=_write(disk, record))
    raise StoreError(f"adapter {name} is being changed by others all the time")


def _write(disk: Disk, record: Record) -> OSError | None:
    try:
        disk.put_record(record)
    except OSError as error:
        return error
    return None


def _join(*copies: Record | None) -> Record | None:
    found: list[Record] = []
    for copy in copies:
        if copy is not None and copy not in found:
            found.append(copy)
    return reduce(merge, found) if found else None
