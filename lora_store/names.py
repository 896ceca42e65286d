"""Records on disk and in Redis: joining the copies, and changing one. Everything here blocks."""

from __future__ import annotations

from dataclasses import dataclass

from adapters.errors import StoreError
from adapters.record import Record, merge
from adapters.registry import Change
from lora_store.disk import Disk
from lora_store.redis import Position, RedisTier

_SWAP_TRIES = 50


@dataclass(frozen=True, slots=True)
class Synced:
    """All records after joining; `position` is that of Redis before, None without Redis."""

    records: dict[str, Record]
    position: Position | None


def sync(disk: Disk, redis: RedisTier | None) -> Synced:
    """Bring the copies of every record on disk and in Redis together.

    A copy in Redis that cannot be read stays as it is, as it may be a newer release's.
    """
    with disk.locked():
        local = disk.records()
        position, stored = redis.records() if redis is not None else (None, {})
        records: dict[str, Record] = {}
        for name in sorted(local.keys() | stored.keys()):
            found = stored.get(name)
            shared = found.record if found is not None else None
            record = _joined(local.get(name), shared)
            if record is None:
                continue
            records[name] = record
            if record != local.get(name):
                disk.put_record(record)
            unreadable = found is not None and shared is None
            if redis is not None and record != shared and not unreadable:
                # Lost against a faster change: its notice starts the next round.
                redis.swap(found, record)
    return Synced(records, position)


def change(disk: Disk, redis: RedisTier | None, name: str, change: Change) -> Record:
    """One atomic change of one record; `change` is `adapters.registry.Change`.

    It replaces a copy in Redis that cannot be read: somebody asked for this name to be changed.
    """
    with disk.locked():
        for _ in range(_SWAP_TRIES):
            stored = redis.record(name) if redis is not None else None
            current = _joined(disk.record(name), stored.record if stored is not None else None)
            record = change(current)
            if record == current:
                return record
            if redis is None or redis.swap(stored, record):
                disk.put_record(record)
                return record
    raise StoreError(f"adapter {name} is being changed by others all the time")


def _joined(one: Record | None, other: Record | None) -> Record | None:
    if one is None or other is None:
        return one or other
    return merge(one, other)
