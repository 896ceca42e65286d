"""Records on disk and in Redis: joining the copies, and changing one. All functions block.

`known` holds the records of this process, a third copy. It may be the only copy of a change that
Redis accepted and lost again while the disk was full.
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
    """Records after joining.

    Attributes:
        records: the joined records, by name.
        position: position of Redis before joining; None without Redis.
        unwritten: records whose current copy could not be written to this disk, with the error.
        unreadable: records whose copies in Redis this release cannot parse.
        unshared: records that Redis lacks, as it accepts no writes now.
        refusal: the reason for `unshared`.
    """

    records: dict[str, Record]
    position: Position | None
    unwritten: dict[str, OSError]
    unreadable: frozenset[str]
    unshared: set[str]
    refusal: StoreError | None


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """A record after a change.

    With both errors it is unknown whether the change was made.

    Attributes:
        record: the changed record.
        shared: True if Redis has it.
        redis_error: why Redis may lack it.
        disk_error: why this disk lacks it.
    """

    record: Record
    shared: bool = False
    redis_error: StoreUnavailable | None = None
    disk_error: OSError | None = None


def sync(disk: Disk, redis: RedisTier | None, known: Mapping[str, Record]) -> SyncResult:
    """Join the copies of every record on disk, in Redis and in `known`, and update them all.

    A copy in Redis that cannot be parsed is not changed, as it may be a newer release's.
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
                    # If another change was faster, its notice starts the next sync.
                    redis.swap(found, record)
            except WritesRefused as error:
                refusal = error
            if refusal is not None:
                unshared.add(name)
    return SyncResult(records, position, unwritten, unreadable, unshared, refusal)


def change(
    disk: Disk, redis: RedisTier | None, name: str, change: Change, known: Record | None
) -> ChangeResult:
    """Make one atomic change of one record; `change` is `adapters.registry.Change`.

    A change that Redis accepted is in force, even if this disk cannot store it. Without Redis, the
    disk decides. An exception means that nothing changed. A copy in Redis that cannot be parsed is
    replaced, because the change of this name was requested explicitly.
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
                # Redis may have accepted it nevertheless, so do not retry: the next sync copies it
                # from the disk to Redis if it is missing.
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
