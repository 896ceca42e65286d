"""SQLite file in which all workers of a gateway store tenants' conversations and responses.

Conversations and responses consist of records. If Redis is configured, the gateway stores the same
records in Redis, too.

A unit is a group (all records of one conversation or response), or a single record without a group.
All records of a unit are renewed, expired and evicted together. SQL triggers update the number of
bytes and records of each unit and each tenant.

The epoch is a number that changes whenever Redis has lost its data. The column `shared` of a record
contains the epoch in which the record was stored in Redis, or 0 if Redis may lack the record.

See decision 067 in docs/decisions.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from gateway.conversations.record import (
    DELETED,
    MAX_MEMBERS,
    MAX_READ_BYTES,
    OVERHEAD_BYTES,
    TOO_LARGE,
    DiskRecord,
    Record,
)
from gateway.errors import ConversationTooLarge

FILE = "conversations.sqlite"
_VERSION = 1
_MAX_REMOVED_AT_ONCE = 256  # maximum number of records that one transaction removes
_MAX_VARIABLES = 500  # maximum number of `?` in a statement; old SQLite versions allow 999
_BUSY_TIMEOUT_S = 5.0
_MAX_LOG_BYTES = 16 * 1024 * 1024
_SCHEMA = f"""
CREATE TABLE tenants(
  name TEXT PRIMARY KEY, bytes INTEGER NOT NULL DEFAULT 0, records INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE units(
  key INTEGER PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, used INTEGER NOT NULL,
  bytes INTEGER NOT NULL DEFAULT 0, records INTEGER NOT NULL DEFAULT 0, UNIQUE(tenant, name)
);
CREATE INDEX units_of_tenant ON units(tenant, used);
CREATE INDEX units_by_use ON units(used);
CREATE TABLE records(
  key INTEGER PRIMARY KEY AUTOINCREMENT,
  tenant TEXT NOT NULL, id TEXT NOT NULL, unit INTEGER NOT NULL,
  version INTEGER NOT NULL, grouped TEXT NOT NULL, place INTEGER NOT NULL,
  shared INTEGER NOT NULL, data BLOB NOT NULL, UNIQUE(tenant, id)
);
CREATE INDEX records_of_unit ON records(unit, place);
CREATE INDEX records_by_epoch ON records(shared);
CREATE TRIGGER added AFTER INSERT ON records BEGIN
  UPDATE units SET bytes = bytes + length(new.data) + {OVERHEAD_BYTES}, records = records + 1
    WHERE key = new.unit;
  INSERT OR IGNORE INTO tenants(name) VALUES (new.tenant);
  UPDATE tenants SET bytes = bytes + length(new.data) + {OVERHEAD_BYTES}, records = records + 1
    WHERE name = new.tenant;
END;
CREATE TRIGGER removed AFTER DELETE ON records BEGIN
  UPDATE units SET bytes = bytes - length(old.data) - {OVERHEAD_BYTES}, records = records - 1
    WHERE key = old.unit;
  DELETE FROM units WHERE key = old.unit AND records = 0;
  UPDATE tenants SET bytes = bytes - length(old.data) - {OVERHEAD_BYTES}, records = records - 1
    WHERE name = old.tenant;
  DELETE FROM tenants WHERE name = old.tenant AND records = 0;
END;
PRAGMA user_version = {_VERSION};
"""
_COLUMNS = "r.tenant, r.id, r.data, r.version, r.grouped, r.place, u.used, r.key"
_RECORDS = "FROM records r JOIN units u ON u.key = r.unit"


class DiskPut(NamedTuple):
    """Result of `ConversationDisk.put`.

    Attributes:
        done: True if the records are stored. If False, the call has evicted other records, but the
            new records still do not fit. The caller must repeat the call.
        evicted: Number of records that this call has evicted.
    """

    done: bool
    evicted: int


class SavedState(NamedTuple):
    """Result of the last poll of Redis, saved on disk for the next start of the gateway.

    All fields except `key` are fields of `shared.RedisState`.

    Attributes:
        epoch: Number that changes when Redis has lost all or many records; 0 if nothing was saved.
        since: Number that changes when Redis may have lost some records.
        seen: Time of the poll, in ms of Redis' clock.
        departed_ms: Last time at which a gateway ended and its disk was deleted, in ms of Redis'
            clock.
        key: Highest key of a record that was on the disk about a minute before the poll. If Redis
            has lost its last writes, it may lack the records with higher keys.
        gateways: Names of the gateways that share this Redis.
    """

    epoch: int
    since: int
    seen: int
    departed_ms: int
    key: int
    gateways: tuple[str, ...]


class ForeignFile(Exception):
    """The SQLite file has an unknown layout: another release of the gateway has created it."""


class ConversationDisk:
    """Access to the SQLite file of conversations and responses.

    Methods block on I/O and raise sqlite3.Error. Call them from one thread at a time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ttl_ms: int,
        tenant_bytes: int,
        renew_ms: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open or create the file.

        Args:
            folder: The folder of the file; created if missing.
            ttl_ms: Milliseconds after which an unused unit (conversation or response) expires.
            tenant_bytes: Maximum number of bytes that the records of one tenant may have.
            renew_ms: Minimum milliseconds between two updates of a unit's time of last use.
            clock: Returns seconds since 1970.

        Raises:
            OSError: The file cannot be created.
            sqlite3.Error: The file cannot be read or written.
            ForeignFile: The file has an unknown layout.
        """
        self._ttl_ms = ttl_ms
        self._tenant_bytes = tenant_bytes
        self._renew_ms = renew_ms
        self._clock = clock
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / FILE
        # Create the file here to set its mode. SQLite creates its log file with the same mode.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._database = sqlite3.connect(
            path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._prepare()
        except BaseException:
            self._database.close()
            raise

    def _prepare(self) -> None:
        run = self._database.execute
        run("PRAGMA auto_vacuum = INCREMENTAL")  # only effective in an empty file
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = NORMAL")
        run(f"PRAGMA journal_size_limit = {_MAX_LOG_BYTES}")
        with self._transaction():
            (version,) = run("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _split_statements(_SCHEMA):
                    run(statement)
            elif version != _VERSION:
                raise ForeignFile(f"its layout is number {version}, not {_VERSION}")
            run("CREATE TABLE IF NOT EXISTS gateways(name TEXT NOT NULL, epoch INTEGER NOT NULL)")
            run("CREATE TABLE IF NOT EXISTS looked(since INTEGER, seen INTEGER, key INTEGER)")
            run("CREATE TABLE IF NOT EXISTS departed(at INTEGER NOT NULL)")

    def close(self) -> None:
        self._database.close()

    def put(
        self, tenant: str, records: Sequence[Record], epoch: int = 0, *, used_ms: int | None = None
    ) -> DiskPut:
        """Store records in one transaction.

        Skip records of which the disk has the same or a higher version. If the tenant would exceed
        its limit, evict the least recently used of the tenant's other records.

        Args:
            tenant: The tenant that owns the records.
            records: The records to store.
            epoch: `RedisState.epoch` at the time at which the records were written to Redis; 0 if
                Redis does not have them.
            used_ms: Time at which the records were last used, in ms since 1970; None for now.

        Raises:
            ConversationTooLarge: The units of these records would have more bytes than a tenant may
                have, or one of them would have more than `MAX_MEMBERS` records.
        """
        used_ms = self._now() if used_ms is None else used_ms
        units = {record.unit for record in records}
        # Skip the transaction (and its write lock) if nothing would change. Most records that were
        # read from Redis are already on the disk.
        if not (
            any(self._is_newer(tenant, record) for record in records)
            or self._has_stale(tenant, units, used_ms - self._renew_ms)
        ):
            return DiskPut(True, 0)
        with self._transaction():
            fresh = [record for record in records if self._is_newer(tenant, record)]
            evicted, fits = self._evict(tenant, units, fresh)
            if fits:
                for record in fresh:
                    self._write(tenant, record, epoch, used_ms)
                self._renew(tenant, units, used_ms)
        return DiskPut(fits, evicted)

    def get(
        self, tenant: str, ids: Iterable[str], *, max_bytes: int = MAX_READ_BYTES
    ) -> list[DiskRecord]:
        """Return the records with these ids that exist, in any order.

        The conversations and responses of these records count as used now, so they expire later.
        Raise ConversationTooLarge if the records have more than `max_bytes` bytes.
        """
        wanted = list(ids)
        found: list[DiskRecord] = []
        for start in range(0, len(wanted), _MAX_VARIABLES):
            some = wanted[start : start + _MAX_VARIABLES]
            where = f"WHERE r.tenant = ? AND r.id IN ({_placeholders(some)}) AND u.used > ?"
            read = self._select(where, [tenant, *some, self._expired_before()], max_bytes)
            max_bytes -= sum(len(stored.record.data) for stored in read)
            found += read
        self._touch(tenant, found)
        return found

    def members(self, tenant: str, group: str, after: int, limit: int) -> list[str]:
        """Return the ids of a group's records whose `order` is above `after`, sorted by `order`.

        At most `limit` ids are returned.
        """
        query = (
            f"SELECT r.id {_RECORDS} WHERE u.tenant = ? AND u.name = ? AND u.used > ?"
            " AND r.grouped = u.name AND r.place > ? ORDER BY r.place, r.id LIMIT ?"
        )
        values = (tenant, group, self._expired_before(), after, limit)
        return [id_ for (id_,) in self._database.execute(query, values)]

    def list_unshared(
        self, epoch: int, before: int | None, limit: int, max_bytes: int
    ) -> list[DiskRecord]:
        """Return a batch of records that must be uploaded to Redis, because Redis may lack them.

        The records that were written to the disk last come first. The first record is returned even
        if it exceeds `max_bytes`. An empty list means that no record is left to upload.

        Args:
            epoch: The present `RedisState.epoch`, which changes when Redis has lost its data.
            before: Return only records with keys below this key; None for all records.
            limit: Maximum number of records.
            max_bytes: Maximum bytes of data in the batch.
        """
        before = 2**63 - 1 if before is None else before
        keys: list[int] = []
        for key, size in self._database.execute(
            "SELECT r.key, length(r.data) FROM records r"
            " WHERE r.key < ? AND r.shared <> ? ORDER BY r.key DESC LIMIT ?",
            (before, epoch, limit),
        ):
            max_bytes -= size
            if keys and max_bytes < 0:
                break
            keys.append(key)
        where = f"WHERE r.key IN ({_placeholders(keys)}) ORDER BY r.key DESC"
        return self._select(where, keys, 2**63)

    def has_unshared(self, epoch: int) -> bool:
        query = (
            "SELECT EXISTS(SELECT 1 FROM records WHERE shared < ?)"
            " OR EXISTS(SELECT 1 FROM records WHERE shared > ?)"
        )
        return bool(self._database.execute(query, (epoch, epoch)).fetchone()[0])

    def last_key(self) -> int:
        """Return the key of the record that was written last. Return 0 if there is no record."""
        (key,) = self._database.execute("SELECT coalesce(max(key), 0) FROM records").fetchone()
        return int(key)

    def mark_unshared(self, after: int) -> None:
        """Mark all records with a key above `after` as not uploaded to Redis."""
        with self._transaction():
            self._database.execute("UPDATE records SET shared = 0 WHERE key > ?", (after,))

    def forget(self, tenant: str, id_: str, epoch: int) -> None:
        """Apply another gateway's deletion of a record. Do nothing if this disk lacks the record.

        The record is replaced by a tombstone: a record without data that marks the id as deleted.
        """
        query = "SELECT 1 FROM records WHERE tenant = ? AND id = ? AND version < ?"
        if self._database.execute(query, (tenant, id_, DELETED)).fetchone() is not None:
            self.put(tenant, [Record(id_, b"", DELETED)], epoch)

    def forget_unit(self, tenant: str, name: str) -> None:
        """Delete all records of a conversation, because Redis has evicted this conversation.

        `name` is the conversation's id. If the records remained on the disk, the gateway might
        upload them to Redis again. The disk may have only some records of the conversation, so
        Redis would then have an incomplete conversation.
        """
        with self._transaction():
            query = "SELECT key FROM units WHERE tenant = ? AND name = ?"
            for (unit,) in self._database.execute(query, (tenant, name)).fetchall():
                self._drop(unit, 2**31)

    def load_state(self) -> SavedState:
        """Return the state that `save_state` saved last.

        If no state was saved, all numbers in the result are 0.
        """
        found = self._database.execute("SELECT epoch, name FROM gateways").fetchall()
        epoch = max((epoch for epoch, _ in found), default=0)
        last = self._database.execute("SELECT since, seen, key FROM looked").fetchone()
        since, seen, key = last or (0, 0, 0)
        (left,) = self._database.execute("SELECT coalesce(max(at), 0) FROM departed").fetchone()
        return SavedState(
            epoch=epoch,
            since=since,
            seen=seen,
            departed_ms=left,
            key=key,
            gateways=tuple(name for _, name in found),
        )

    def save_state(self, state: SavedState) -> None:
        epoch, since, seen, left, key, names = state
        with self._transaction():
            self._database.execute("DELETE FROM looked")
            self._database.execute("INSERT INTO looked VALUES (?, ?, ?)", (since, seen, key))
            self._database.execute("DELETE FROM departed")
            self._database.execute("INSERT INTO departed VALUES (?)", (left,))
            self._database.execute("DELETE FROM gateways")
            rows = [(name, epoch) for name in names]
            self._database.executemany("INSERT INTO gateways(name, epoch) VALUES (?, ?)", rows)

    def mark_shared(self, keys: Sequence[int], epoch: int) -> None:
        with self._transaction():
            query = f"UPDATE records SET shared = ? WHERE key IN ({_placeholders(keys)})"
            self._database.execute(query, [epoch, *keys])

    def tidy(self) -> bool:
        """Delete some expired records, and truncate the file by some of its unused pages.

        Return True if there is more to do: more expired records or more unused pages.
        """
        with self._transaction():
            query = "SELECT key FROM units WHERE used <= ? ORDER BY used LIMIT ?"
            removed = 0
            for (unit,) in self._database.execute(
                query, (self._expired_before(), _MAX_REMOVED_AT_ONCE)
            ).fetchall():
                removed += self._drop(unit, _MAX_REMOVED_AT_ONCE - removed)
                if removed == _MAX_REMOVED_AT_ONCE:
                    break
        # Use `executescript`, because `execute` runs this pragma for one page only.
        self._database.executescript(f"PRAGMA incremental_vacuum({_MAX_REMOVED_AT_ONCE})")
        (free,) = self._database.execute("PRAGMA freelist_count").fetchone()
        return removed == _MAX_REMOVED_AT_ONCE or free > _MAX_REMOVED_AT_ONCE

    def usage(self) -> tuple[int, int]:
        """Return the number of bytes and the number of records of all tenants together."""
        query = "SELECT coalesce(sum(bytes), 0), coalesce(sum(records), 0) FROM tenants"
        total, records = self._database.execute(query).fetchone()
        return total, records

    def _now(self) -> int:
        return int(self._clock() * 1000)

    def _expired_before(self) -> int:
        return self._now() - self._ttl_ms

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _is_newer(self, tenant: str, record: Record) -> bool:
        query = "SELECT version FROM records WHERE tenant = ? AND id = ?"
        found = self._database.execute(query, (tenant, record.id)).fetchone()
        return found is None or record.version > found[0]

    def _evict(self, tenant: str, units: set[str], fresh: Sequence[Record]) -> tuple[int, bool]:
        """Evict a tenant's least recently used units to make space for the new records `fresh`.

        A unit is a conversation, a response or a single record. The units in `units` are never
        evicted. One call removes at most 256 records.

        Return two values: the number of removed records, and True if there is enough space now.
        Raise ConversationTooLarge if there would be too little space even without all other units,
        or if a group would have more than `MAX_MEMBERS` records.
        """
        need = sum(record.size for record in fresh)
        own, largest = self._measure(tenant, units)
        grouped = sum(bool(record.group) for record in fresh)
        if own + need > self._tenant_bytes or (grouped and largest + grouped > MAX_MEMBERS):
            raise ConversationTooLarge(TOO_LARGE.format(self._tenant_bytes))
        removed = 0
        while True:
            query = "SELECT bytes FROM tenants WHERE name = ?"
            if (self._database.execute(query, (tenant,)).fetchone() or (0,))[0] + need <= (
                self._tenant_bytes
            ):
                return removed, True
            query = "SELECT key, name FROM units WHERE tenant = ? ORDER BY used, key LIMIT ?"
            oldest = self._database.execute(query, (tenant, len(units) + 1)).fetchall()
            victim = next((key for key, name in oldest if name not in units), None)
            if victim is None or removed == _MAX_REMOVED_AT_ONCE:
                return removed, victim is None
            removed += self._drop(victim, _MAX_REMOVED_AT_ONCE - removed)

    def _measure(self, tenant: str, units: set[str]) -> tuple[int, int]:
        """Return (total bytes of the units, number of records in the unit with the most records).

        A unit is a conversation, a response or a single record.
        """
        query = "SELECT bytes, records FROM units WHERE tenant = ? AND name = ?"
        found = [
            self._database.execute(query, (tenant, unit)).fetchone() or (0, 0) for unit in units
        ]
        return sum(size for size, _ in found), max((count for _, count in found), default=0)

    def _drop(self, unit: int, limit: int) -> int:
        """Remove at most `limit` records of a unit. Return the number of removed records.

        A unit is a conversation, a response or a single record. The first removed record of a
        conversation or response is its head: the record whose id is also the conversation's or
        response's id.
        """
        query = (
            "DELETE FROM records WHERE key IN"
            " (SELECT key FROM records WHERE unit = ? ORDER BY grouped <> '', place LIMIT ?)"
        )
        return self._database.execute(query, (unit, limit)).rowcount

    def _write(self, tenant: str, record: Record, epoch: int, used_ms: int) -> None:
        run = self._database.execute
        # Delete and insert the record instead of updating it, so that it gets a new, higher key.
        # The records with the highest keys are uploaded to Redis first.
        run("DELETE FROM records WHERE tenant = ? AND id = ?", (tenant, record.id))
        run(
            "INSERT OR IGNORE INTO units(tenant, name, used) VALUES (?, ?, ?)",
            (tenant, record.unit, used_ms),
        )
        run(
            "INSERT INTO records(tenant, id, unit, version, grouped, place, shared, data)"
            " SELECT tenant, ?, key, ?, ?, ?, ?, ? FROM units WHERE tenant = ? AND name = ?",
            (
                *(record.id, record.version, record.group, record.order, epoch, record.data),
                *(tenant, record.unit),
            ),
        )

    def _select(self, where: str, values: Sequence[Any], max_bytes: int) -> list[DiskRecord]:
        lengths = self._database.execute(f"SELECT length(r.data) {_RECORDS} {where}", values)
        if sum(length for (length,) in lengths) > max_bytes:
            raise ConversationTooLarge("It is too large to be read at once.")
        return [
            DiskRecord(tenant, Record(*record), used_ms, key)
            for tenant, *record, used_ms, key in self._database.execute(
                f"SELECT {_COLUMNS} {_RECORDS} {where}", values
            )
        ]

    def _touch(self, tenant: str, found: Sequence[DiskRecord]) -> None:
        """Mark the conversations and responses of these records as used now.

        To save writes, skip conversations and responses that were marked less than `renew_ms`
        milliseconds ago.
        """
        now = self._now()
        stale = {
            stored.record.unit
            for stored in found
            if stored.record.data and stored.used_ms < now - self._renew_ms
        }
        # Ignore a failed write: a read must succeed even if the disk is read-only.
        with suppress(sqlite3.OperationalError):
            if stale:
                with self._transaction():
                    self._renew(tenant, stale, now)

    def _has_stale(self, tenant: str, units: set[str], before_ms: int) -> bool:
        query = "SELECT 1 FROM units WHERE tenant = ? AND name = ? AND used < ?"
        return any(
            self._database.execute(query, (tenant, unit, before_ms)).fetchone() is not None
            for unit in units
        )

    def _renew(self, tenant: str, units: set[str], used_ms: int) -> None:
        query = "UPDATE units SET used = ? WHERE tenant = ? AND name = ? AND used < ?"
        self._database.executemany(query, [(used_ms, tenant, unit, used_ms) for unit in units])


def _placeholders(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def _split_statements(script: str) -> Iterator[str]:
    """Yield the statements of an SQL script one by one.

    The caller runs each statement with `execute` in one transaction. It cannot run the script with
    `executescript`, because `executescript` would end the transaction.
    """
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
