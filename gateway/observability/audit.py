"""Audit log, with one entry for each action of an admin, including failed actions.

An entry is a line of the log and a row of the table `audit_log`. If the database is unavailable,
the line alone remains: an action of an admin must not fail for that.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import orjson

from gateway.database.connection import Connection
from gateway.database.database import Database
from gateway.errors import DatabaseUnavailable

log = logging.getLogger("gateway.audit")

_MAX_TARGET = 256  # characters of a name that are logged: an invalid name may have megabytes
_RETENTION_S = 400 * 24 * 3600
_MAX_DELETED = 16
"""Maximum number of expired entries that a new entry deletes, so that the table cannot grow on."""

State = Mapping[str, object] | None
"""The object that an admin changes, such as a key or an adapter, as JSON data without secrets.

None if the object does not exist.
"""


@dataclass(slots=True)
class Action:
    """States of an object before and after an action of an admin.

    `after` is initially equal to `before`. If the action fails, the log line therefore shows no
    change.
    """

    before: State
    after: State


class Entry(NamedTuple):
    """An entry of the audit log.

    Attributes:
        id: Random id of the entry.
        at: Time of the action's end, in seconds since 1970.
        admin: The admin's id, as returned by `Access.admin`.
        action: What the admin did, such as "keys.create".
        target: Name of the changed object; control characters and lone surrogates are escaped.
        outcome: "done", or the name of the exception.
        before: `Action.before` as JSON.
        after: `Action.after` as JSON.
    """

    id: str
    at: int
    admin: str
    action: str
    target: str
    outcome: str
    before: bytes
    after: bytes


class Audit:
    """Audit log of one admin. `admin` is the admin's id, as returned by `Access.admin`."""

    def __init__(self, admin: str, database: Database) -> None:
        self.admin = admin
        self._database = database

    @asynccontextmanager
    async def action(self, action: str, target: str, before: State) -> AsyncIterator[Action]:
        """Return a context manager that logs an action at the end of the context.

        The action is logged even if it fails with an exception. Within the context, the caller sets
        `Action.after` to the changed object.
        """
        entry = Action(before, before)
        outcome = "done"
        try:
            yield entry
        except BaseException as error:
            outcome = type(error).__name__
            raise
        finally:
            await self._write(action, target, outcome, entry)

    async def _write(self, action: str, target: str, outcome: str, entry: Action) -> None:
        # Escape lone surrogates: clients can send them in form fields, but JSON cannot represent
        # them. Escape NUL: PostgreSQL's text cannot contain it.
        shown = target[:_MAX_TARGET].encode("utf-8", "backslashreplace").decode("utf-8")
        shown = shown.replace("\0", "\\x00")
        facts = {
            "admin": self.admin,
            "action": action,
            "target": shown,
            "outcome": outcome,
            "before": entry.before,
            "after": entry.after,
        }
        states = orjson.dumps(entry.before), orjson.dumps(entry.after)
        log.info(
            "%s %s %r: %s, before %s, after %s",
            *(self.admin, action, shown, outcome, *(state.decode() for state in states)),
            extra={"facts": facts},
        )
        at = int(time.time())
        row = Entry(uuid.uuid4().hex, at, self.admin, action, shown, outcome, *states)
        try:
            await self._database.write(partial(_insert, entry=row))
        except DatabaseUnavailable as error:
            log.error("the entry of this action is in this log alone: %s", error.why)


async def _insert(connection: Connection, entry: Entry) -> None:
    await connection.fetch(
        "DELETE FROM audit_log WHERE id IN"
        " (SELECT id FROM audit_log WHERE at < $1 ORDER BY at, id LIMIT $2)",
        *(entry.at - _RETENTION_S, _MAX_DELETED),
    )
    await connection.fetch(
        "INSERT INTO audit_log (id, at, admin, action, target, outcome, before, after)"
        " VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        *entry,
    )


async def read_entries(
    connection: Connection, *, before: str | None, limit: int
) -> Sequence[Entry] | None:
    """Return at most `limit` entries, the newest first.

    `before` is the id of an entry; the entries returned are older. Return None if there is no entry
    of this id.
    """
    at, last = 2**62, ""
    if before is not None:
        last = before
        found = await connection.fetch_value("SELECT at FROM audit_log WHERE id = $1", before)
        if found is None:
            return None
        at = found
    rows = await connection.fetch(
        "SELECT id, at, admin, action, target, outcome, before, after FROM audit_log"
        " WHERE (at, id) < ($1, $2) ORDER BY at DESC, id DESC LIMIT $3",
        *(at, last, limit),
    )
    return [Entry(*row) for row in rows]
