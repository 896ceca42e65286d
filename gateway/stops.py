"""Generations that are left before their end, until their engine has let go of them.

What stops a generation is sent at once, but the engine ends it with its next step, and only the end
of its stream shows that it has. Who paid for that time, and whether it was short, is worth knowing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

StopReason = Literal["disconnect", "stop_string", "timeout", "shutdown", "moved", "cancelled"]
"""`cancelled` is by an admin."""

LOGGED_REASONS: frozenset[StopReason] = frozenset({"disconnect", "timeout", "moved", "cancelled"})
"""Those that are worth a log line each. A stop string is an answer's ordinary end."""


class EarlyStop:
    """One generation. `end` is to be called once its stream has ended or was given up."""

    __slots__ = ("_listeners", "began", "is_over", "reason", "seconds")

    def __init__(self, reason: StopReason, began: float | None = None) -> None:
        """`began` is when it was decided that it should end, in `time.perf_counter`."""
        self.reason = reason
        self.began = time.perf_counter() if began is None else began
        self.seconds: float | None = None
        """Until the engine had let go; None where that was not seen, or not yet."""
        self.is_over = False
        self._listeners: list[Callable[[EarlyStop], None]] = []

    def add_listener(self, listener: Callable[[EarlyStop], None]) -> None:
        """`listener` is told when it is over; at once where it is."""
        if self.is_over:
            listener(self)
        else:
            self._listeners.append(listener)

    def end(self, freed: bool) -> None:
        """The engine has ended the stream, or (not `freed`) it was reset or lost before."""
        if self.is_over:
            return
        self.is_over = True
        if freed:
            self.seconds = time.perf_counter() - self.began
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(self)


class Stops:
    """All of one request: each choice that is left early has one, at each replica that it leaves.

    `told` is called whenever none of them is open any more.
    """

    __slots__ = ("_on_all_ended", "open", "reason", "seconds", "unseen")

    def __init__(self, on_all_ended: Callable[[Stops], None]) -> None:
        self._on_all_ended = on_all_ended
        self.open = 0
        self.reason: StopReason = "disconnect"
        """Of the last one."""
        self.seconds: float | None = None
        """Until the slowest of them was let go."""
        self.unseen = 0
        """Those whose end nobody saw."""

    def begin(self, reason: StopReason, began: float | None = None) -> EarlyStop:
        self.reason = reason
        self.open += 1
        stopping = EarlyStop(reason, began)
        stopping.add_listener(self._count_end)
        return stopping

    def _count_end(self, stopping: EarlyStop) -> None:
        self.open -= 1
        if stopping.seconds is None:
            self.unseen += 1
        else:
            self.seconds = max(self.seconds or 0.0, stopping.seconds)
        if not self.open:
            self._on_all_ended(self)

    def facts(self) -> dict[str, object]:
        """For log lines and for who looks: `stop_ms` is not there where no end was seen."""
        facts: dict[str, object] = {"stop": self.reason}
        if self.seconds is not None and not self.unseen:
            facts["stop_ms"] = round(self.seconds * 1000, 1)
        return facts
