"""Early stops of generations, and the time until the engine has stopped.

A cancellation is sent to the engine at once, but the engine stops only after its current step. The
end of the gRPC stream is the only sign that the engine has stopped. The gateway measures the time
until this sign, in which the engine still computes for the cancelled request.

See decision 007 in docs/decisions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

StopReason = Literal["disconnect", "stop_string", "timeout", "shutdown", "moved", "cancelled"]
"""Reason for an early stop.

`cancelled` means that an admin ended the request, `moved` that another replica resumes it.
"""

LOGGED_REASONS: frozenset[StopReason] = frozenset({"disconnect", "timeout", "moved", "cancelled"})
"""Reasons that are logged for each request. A stop string is a normal end of a response."""


class EarlyStop:
    """Early stop of one generation. Call `end` when the gRPC stream has ended or is abandoned."""

    __slots__ = ("_listeners", "began", "is_over", "reason", "seconds")

    def __init__(self, reason: StopReason, began: float | None = None) -> None:
        """Start the measurement.

        `began` is the time of the decision to stop, in seconds of `time.perf_counter`; None for
        now.
        """
        self.reason = reason
        self.began = time.perf_counter() if began is None else began
        self.seconds: float | None = None
        """Seconds from `began` until the engine had stopped; None before, or if not observed."""
        self.is_over = False
        self._listeners: list[Callable[[EarlyStop], None]] = []

    def add_listener(self, listener: Callable[[EarlyStop], None]) -> None:
        """Call `listener` when the stop is over. Call it at once if the stop is already over."""
        if self.is_over:
            listener(self)
        else:
            self._listeners.append(listener)

    def end(self, freed: bool) -> None:
        """Mark the stop as over.

        `freed` is True if the engine ended the gRPC stream, which shows that it has stopped. It is
        False if the end was not observed, for example because the connection was lost.
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
    """The early stops of one request: one for each stopped choice on each replica.

    `on_all_ended` is called when all stops so far are over. It is called again if further stops
    begin and end later.
    """

    __slots__ = ("_on_all_ended", "open", "reason", "seconds", "unseen")

    def __init__(self, on_all_ended: Callable[[Stops], None]) -> None:
        self._on_all_ended = on_all_ended
        self.open = 0
        self.reason: StopReason = "disconnect"
        """Reason of the stop that began last."""
        self.seconds: float | None = None
        """Duration of the slowest stop in seconds; None before the first engine has stopped."""
        self.unseen = 0
        """Number of stops that are over although the end of the gRPC stream was not observed."""

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

        The field `stop_ms` is the duration of the slowest stop in milliseconds. It is omitted if
        the end of a gRPC stream was not observed.
        """
        facts: dict[str, object] = {"stop": self.reason}
        if self.seconds is not None and not self.unseen:
            facts["stop_ms"] = round(self.seconds * 1000, 1)
        return facts
