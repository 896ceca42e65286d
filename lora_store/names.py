"""Records on disk and in Redis: joining the copies, and changing one. Everything here blocks.

`known` is what this process knows already, a third copy: it may be all that is left of a change
that Redis took and lost again before the disk, which was full, could keep it.
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
class Synced:
    """All records after joining; `position` is that of Redis before, None without Redis.

    `unwritten`: why this disk has no current copy of these. `unreadable`: those whose copies in
    Redis say what this release does not understand. `unshared`: those that Redis lacks, as it takes
    no writes now, with the reason in `refusal`.
    """

    records: dict[str, Record]
    position: Position | None
    unwritten: dict[str, OSError]
    unreadable: frozenset[str]
    unshared: set[str]
    refusal: StoreError | None


@dataclass(frozen=True, slots=True)
class Changed:
    """A record after a change, and why Redis may not have it or this disk has not.

    With both errors nobody knows whether the change was made. `shared`: Redis has it.
    """

    record: Record
    shared: bool = False
    redis_error: StoreUnavailable | None = None
    disk_error: OSError | None = None


def sync(disk: Disk, redis: RedisTier | None, known: Mapping[str, Record]) -> Synced:
    """Bring the copies of every record on disk, in Redis and here together.

    A copy in Redis that cannot be read stays as it is, as it may be a newer release's.
    """
    with disk.locked():
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
            record = _joined(local.get(name), shared, known.get(name))
            if record is None:
                continue
            records[name] = record
            if record != local.get(name) and (error := _write(disk, record)) is not None:
                unwritten[name] = error
            if redis is None or record == shared or name in unreadable:
                continue
            try:
                if refusal is None:
                    # Lost against a faster change: its notice starts the next round.
                    redis.swap(found, record)
            except WritesRefused as error:
                refusal = error
            if refusal is not None:
                unshared.add(name)
    return Synced(records, position, unwritten, unreadable, unshared, refusal)


def change(
    disk: Disk, redis: RedisTier | None, name: str, change: Change, known: Record | None
) -> Changed:
    """One atomic change of one record; `change` is `adapters.registry.Change`.

    What Redis took has happened, also where this disk cannot keep it; without Redis the disk is
    what takes it. What raises here has changed nothing.

    It replaces a copy in Redis that cannot be read: somebody asked for this name to be changed.
    """
    with disk.locked():
        for _ in range(_SWAP_TRIES):
            stored = redis.record(name) if redis is not None else None
            shared = stored.record if stored is not None else None
            current = _joined(disk.record(name), shared, known)
            record = change(current)
            if record == current:
                return Changed(record, shared=record == shared)
            if redis is None:
                disk.put_record(record)
                return Changed(record)
            try:
                if not redis.swap(stored, record):
                    continue
            except StoreUnavailable as error:
                # It may have been taken all the same. So it is not tried anew: from the disk it
                # comes to Redis if it is not there.
                return Changed(record, redis_error=error, disk_error=_write(disk, record))
            return Changed(record, shared=True, disk_error=_write(disk, record))
    raise StoreError(f"adapter {name} is being changed by others all the time")


def _write(disk: Disk, record: Record) -> OSError | None:
    try:
        disk.put_record(record)
    except OSError as error:
        return error
    return None


def _joined(*copies: Record | None) -> Record | None:
    found: list[Record] = []
    for copy in copies:
        if copy is not None and copy not in found:
            found.append(copy)
    return reduce(merge, found) if found else None
