"""The audit log: one line for each action, or attempted action, of an admin."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import orjson

log = logging.getLogger("gateway.audit")

_MAX_TARGET = 256  # characters; a refused name may be megabytes

State = Mapping[str, object] | None
"""The target's state in JSON types; None if the target does not exist. Never a secret."""


@dataclass(slots=True)
class Action:
    """The states of the target. `after` defaults to `before`, so a failed action is recorded as no
    change."""

    before: State
    after: State


class Audit:
    """Audit log of one admin. `admin` is the beginning of the key's hash, as in `Access.admin`."""

    def __init__(self, admin: str) -> None:
        self.admin = admin

    @contextmanager
    def action(self, action: str, target: str, before: State) -> Iterator[Action]:
        """Wrap the action; write its line when the action ends, also after an error."""
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
        # Forms may contain lone surrogates, which JSON cannot represent.
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
