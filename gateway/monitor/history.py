"""The last hour in steps of ten seconds.

A step is what totals have grown by since the last one, so nothing is counted for it while requests
run; only their tokens, which are not in any total until they end, are added up once a step.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gateway.monitor.latencies import Latencies

STEP_S = 10
STEPS = 360
_TIMER_TOLERANCE_S = 1.0  # a sleep may end a moment before its time


def until_step_ends(now: float) -> float:
    """Seconds; that of the next step where a sleep for this one has ended a moment early."""
    return STEP_S + _TIMER_TOLERANCE_S - (now + _TIMER_TOLERANCE_S) % STEP_S


@dataclass(slots=True)
class Totals:
    """Since the process began."""

    tokens: int = 0
    """Generated, by requests that have ended."""
    requests: int = 0
    errors: int = 0
    uploads: int = 0


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One step. `at` is when it began, in seconds since 1970: a multiple of `STEP_S`, so that those
    of several processes fall together."""

    at: int
    tokens: int
    requests: int
    errors: int
    uploads: int
    queue: int
    """Requests that waited at its end."""
    first_tokens: dict[int, int]
    """`Latencies` of the requests that ended in it."""

    def facts(self) -> dict[str, object]:
        facts: dict[str, object] = {
            "tokens": self.tokens,
            "requests": self.requests,
            "errors": self.errors,
            "cold_sends": self.uploads,
            "queue": self.queue,
        }
        if self.first_tokens:
            facts["first_tokens"] = {str(k): n for k, n in self.first_tokens.items()}
        return facts


@dataclass(slots=True)
class RecentHistory:
    totals: Totals = field(default_factory=Totals)
    points: deque[HistoryPoint] = field(default_factory=lambda: deque(maxlen=STEPS))
    first_tokens: Latencies = field(default_factory=Latencies)
    _before: Totals = field(default_factory=Totals)

    def step(self, now: float, running_tokens: int, uploads: int, queue: int) -> None:
        """Ends a step. `running_tokens` are those of requests that run, `uploads` all that there
        were; both may be fewer than the last time, as may be what is left of a replica that left.
        """
        totals, before = self.totals, self._before
        tokens = totals.tokens + running_tokens
        self.points.append(
            HistoryPoint(
                at=int(now + _TIMER_TOLERANCE_S) // STEP_S * STEP_S - STEP_S,
                tokens=max(0, tokens - before.tokens),
                requests=totals.requests - before.requests,
                errors=totals.errors - before.errors,
                uploads=max(0, uploads - before.uploads),
                queue=queue,
                first_tokens=self.first_tokens.counts,
            )
        )
        self._before = Totals(tokens, totals.requests, totals.errors, uploads)
        self.first_tokens = Latencies()
