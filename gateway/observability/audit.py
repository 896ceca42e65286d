"""Audit log, with one line for each action of an admin, including failed actions."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import orjson

log = logging.getLogger("gateway.audit")

_MAX_TARGET = 256  # characters of a name that are logged: an invalid name may have megabytes

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


class Audit:
    """Audit log of one admin. `admin` is the admin's id, as returned by `Access.admin`."""

    def __init__(self, admin: str) -> None:
        self.admin = admin

    @contextmanager
    def action(self, action: str, target: str, before: State) -> Iterator[Action]:
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
            self._write(action, target, outcome, entry)

    def _write(self, action: str, target: str, outcome: str, entry: Action) -> None:
        # Escape lone surrogates: clients can send them in form fields, but JSON cannot represent
        # them.
        shown = target[:_MAX_TARGET].encode("utf-8", "backslashreplace").decode("utf-8")
        facts = {
            "admin": self.admin,
            "action": action,
            "target": shown,
            "outcome": outcome,
            "before": entry.before,
            "after": entry.after,
        }
        log.info(
            "%s %s %r: %s, before %s, after %s",
            *(self.admin, action, shown, outcome),
            *(orjson.dumps(state).decode() for state in (entry.before, entry.after)),
            extra={"facts": facts},
        )
