"""Early stops of generations, from the decision until the engine has stopped.

A cancellation is sent at once, but the engine stops only with its next step, and the end of its
stream is the only sign of that. The time in between is measured, because the engine still works.

See decision 007 in docs/decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

StopReason = Literal["disconnect", "stop_string", "timeout", "shutdown", "moved", "cancelled"]
"""Reason for an early stop; `cancelled` means that an admin ended the request."""

LOGGED_REASONS: frozenset[StopReason] = frozenset({"disconnect", "timeout", "moved", "cancelled"})
"""Reasons that are logged for each request. A stop string is an ordinary end of an answer."""


class EarlyStop:
    """The stop of one generation. Call `end` once the stream has ended or was given up."""

    __slots__ = ("_listeners", "began", "is_over", "reason", "seconds")

    def __init__(self, reason: StopReason, began: float | None = None) -> None:
        """Start the stop.

        `began` is the time at which the stop was decided, in `time.perf_counter`; None for now.
        """
        self.reason = reason
        self.began = time.perf_counter() if began is None else began
        self.seconds: float | None = None
        """Seconds until the engine had stopped; None while the stop is not over, or if the engine's
        end was not seen."""
        self.is_over = False
        self._listeners: list[Callable[[EarlyStop], None]] = []

    def add_listener(self, listener: Callable[[EarlyStop], None]) -> None:
        """Call `listener` when the stop is over; at once if it already is."""
        if self.is_over:
            listener(self)
        else:
            self._listeners.append(listener)

    def end(self, freed: bool) -> None:
        """Mark the stop as over.

        `freed` is True if the engine ended the stream, and False if the stream was reset or lost
        before that.
        """
        if self.is_over:
            return
        self.is_over = True
        if freed:
            self.seconds = time.perf_counter() - self.began
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(self)


class Stops:
    """The stops of one request: one for each abandoned choice on each replica.

    `on_all_ended` is called whenever the last open stop is over.
    """

    __slots__ = ("_on_all_ended", "open", "reason", "seconds", "unseen")

    def __init__(self, on_all_ended: Callable[[Stops], None]) -> None:
        self._on_all_ended = on_all_ended
        self.open = 0
        self.reason: StopReason = "disconnect"
        """The reason of the last stop."""
        self.seconds: float | None = None
        """Duration of the slowest stop in seconds; None before the first one was seen to end."""
        self.unseen = 0
        """Number of stops that are over but whose engine was not seen to stop."""

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
        """Return fields for log lines and the console.

        `stop_ms` is omitted if an engine was not seen to stop.
        """
        facts: dict[str, object] = {"stop": self.reason}
        if self.seconds is not None and not self.unseen:
            facts["stop_ms"] = round(self.seconds * 1000, 1)
        return facts
