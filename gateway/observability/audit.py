"""The audit log: a line for each thing that an admin does, or tries to do."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import orjson

log = logging.getLogger("gateway.audit")

_MAX_TARGET = 256  # characters; a name that is refused may be megabytes

State = Mapping[str, object] | None
"""What there is of the target, as JSON can say it; None where there is none. Never a secret."""


@dataclass(slots=True)
class Action:
    """`after` is as `before` until it is set: what failed has changed nothing."""

    before: State
    after: State


class Audit:
    """What one admin does. `admin` is the beginning of the key's hash, as in `Access.admin`."""

    def __init__(self, admin: str) -> None:
        self.admin = admin

    @contextmanager
    def action(self, action: str, target: str, before: State) -> Iterator[Action]:
        """Around the action; when it has ended, in whatever way, its line is written."""
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
        # Forms may hold lone surrogates, which JSON cannot.
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
