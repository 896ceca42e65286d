"""Audit log. It has one line for each action of an admin, including failed ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import orjson

log = logging.getLogger("gateway.audit")

_MAX_TARGET = 256  # characters that are logged: a refused name may have megabytes

State = Mapping[str, object] | None
"""State of an action's target, in JSON types and without secrets. None if the target does not
exist.
"""


@dataclass(slots=True)
class Action:
    """States of the target before and after an action.

    `after` is initially `before`, so a failed action is recorded as no change.
    """

    before: State
    after: State


class Audit:
    """Audit log of one admin. `admin` is the beginning of the hash of the admin's key, as in
    `Access.admin`.
    """

    def __init__(self, admin: str) -> None:
        self.admin = admin

    @contextmanager
    def action(self, action: str, target: str, before: State) -> Iterator[Action]:
        """Return a context manager that logs an action when the context ends, also after an error.

        The caller sets `Action.after` within the context.
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
        # Escape lone surrogates, which clients can send in forms and which JSON cannot represent.
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
