"""Generations abandoned early, until their engine has stopped them.

The cancellation is sent at once, but the engine stops with its next step, and only the end of its
stream shows that. The time in between is metered: it costs engine time.

See decision 007 in docs/decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

StopReason = Literal["disconnect", "stop_string", "timeout", "shutdown", "moved", "cancelled"]
"""`cancelled` means by an admin."""

LOGGED_REASONS: frozenset[StopReason] = frozenset({"disconnect", "timeout", "moved", "cancelled"})
"""Reasons that are logged for each request. A stop string is an ordinary end of an answer."""


class EarlyStop:
    """Stop of one generation. Call `end` once its stream has ended or was given up."""

    __slots__ = ("_listeners", "began", "is_over", "reason", "seconds")

    def __init__(self, reason: StopReason, began: float | None = None) -> None:
        """Start the stop. `began` is the time of the decision, in `time.perf_counter`; None for
        now."""
        self.reason = reason
        self.began = time.perf_counter() if began is None else began
        self.seconds: float | None = None
        """Seconds until the engine had stopped; None if that was not seen, or not yet."""
        self.is_over = False
        self._listeners: list[Callable[[EarlyStop], None]] = []

    def add_listener(self, listener: Callable[[EarlyStop], None]) -> None:
        """Call `listener` when the stop is over; at once if it already is."""
        if self.is_over:
            listener(self)
        else:
            self._listeners.append(listener)

    def end(self, freed: bool) -> None:
        """Mark the stop as over: the engine ended the stream (`freed`), or it was reset or lost
        before."""
        if self.is_over:
            return
        self.is_over = True
        if freed:
            self.seconds = time.perf_counter() - self.began
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(self)


class Stops:
    """Stops of one request: one for each abandoned choice on each replica.

    `on_all_ended` is called whenever the last open stop is over.
    """

    __slots__ = ("_on_all_ended", "open", "reason", "seconds", "unseen")

    def __init__(self, on_all_ended: Callable[[Stops], None]) -> None:
        self._on_all_ended = on_all_ended
        self.open = 0
        self.reason: StopReason = "disconnect"
        """The reason of the last stop."""
        self.seconds: float | None = None
        """Seconds until the slowest stop was over."""
        self.unseen = 0
        """Number of stops whose end was not seen."""

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
        """Return fields for log lines and the console. `stop_ms` is omitted if an end was not
        seen."""
        facts: dict[str, object] = {"stop": self.reason}
        if self.seconds is not None and not self.unseen:
            facts["stop_ms"] = round(self.seconds * 1000, 1)
        return facts
