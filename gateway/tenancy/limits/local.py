"""Limits counted by this process alone, by the same arithmetic as in Redis (`script.lua`).

A window slides by whole seconds: what was counted in second s is gone when second s + 61 begins, so
in no 60 seconds does more pass than the limit allows. (A token bucket would let twice as much pass
in its first minute.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.config.limits import LIMITS, LimitName
from gateway.errors import Quota
from gateway.tenancy.limits.request import (
    BUSY_WAIT_MS,
    NEVER,
    WINDOW_S,
    Decision,
    LimitRequest,
    Settlement,
)


class Window:
    """What was counted in each of the last seconds."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def total(self, second: int) -> int:
        """All that still counts; forgets the rest."""
        for old in [at for at in self._counts if at < second - WINDOW_S]:
            del self._counts[old]
        return sum(self._counts.values())

    def add(self, second: int, amount: int) -> None:
        self._counts[second] = self._counts.get(second, 0) + amount

    def wait_ms(self, now_ms: int, excess: int) -> int:
        """Until at least `excess` of what counts now counts no more; BUSY_WAIT_MS if it is less."""
        if excess <= 0:
            return 0
        for second, amount in sorted(self._counts.items()):
            excess -= amount
            if excess <= 0:
                return _gone_ms(second) - now_ms
        return BUSY_WAIT_MS

    def reset_ms(self, now_ms: int) -> int:
        """Until nothing counts."""
        return _gone_ms(max(self._counts)) - now_ms if self._counts else 0


def _gone_ms(second: int) -> int:
    return (second + WINDOW_S + 1) * 1000


@dataclass(slots=True)
class _Counts:
    windows: defaultdict[LimitName, Window] = field(default_factory=lambda: defaultdict(Window))
    places: int = 0
    tokens: int = 0
    """Held by running requests."""


class LocalLimits:
    """Belongs to one event loop. It counts no budgets: they would be forgotten at its end."""

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        """`clock_ms` never goes back."""
        self._clock_ms = clock_ms
        self._tenants: defaultdict[str, _Counts] = defaultdict(_Counts)

    def take(self, request: LimitRequest) -> Decision:
        """Counts the request if no limit is in its way."""
        counts, now_ms = self._tenants[request.tenant], self._clock_ms()
        second = now_ms // 1000
        used: dict[LimitName, int] = {}
        waits: dict[LimitName, int] = {}
        for name, limit in request.limits.items():
            wanted, unit = request.wanted(name), LIMITS[name].counts
            if unit == "places":
                used[name] = counts.places
            else:
                used[name] = counts.windows[name].total(second)
                used[name] += counts.tokens if unit == "tokens" else 0
            excess = used[name] + wanted - limit
            if wanted > limit:
                waits[name] = NEVER
            elif unit == "places":
                waits[name] = BUSY_WAIT_MS if excess > 0 else 0
            else:
                waits[name] = counts.windows[name].wait_ms(now_ms, excess)
        refused, wait_ms = longest(waits)
        if refused is None:
            for name in request.limits:
                used[name] += request.wanted(name)
            self._count(counts, request, second)
        quotas: dict[str, Quota] = {}
        for name, limit in request.limits.items():
            reset_ms = counts.windows[name].reset_ms(now_ms)
            if LIMITS[name].counts == "tokens" and counts.tokens:
                reset_ms = _gone_ms(second) - now_ms
            quotas[name] = Quota(limit, used[name], reset_ms)
        return Decision(refused, wait_ms, quotas, now_ms)

    def _count(self, counts: _Counts, request: LimitRequest, second: int) -> None:
        units = {LIMITS[name].counts for name in request.limits}
        counts.places += request.places if "places" in units else 0
        counts.tokens += request.tokens if "tokens" in units else 0
        if "requests_per_minute" in request.limits:
            counts.windows["requests_per_minute"].add(second, request.requests)

    def settle(self, settlement: Settlement) -> None:
        """Count what was used in the present second."""
        request, released, used, kept, places = settlement
        counts = self._tenants[request.tenant]
        counts.tokens += kept - released
        if used and "tokens_per_minute" in request.limits:
            counts.windows["tokens_per_minute"].add(self._clock_ms() // 1000, used)
        counts.places -= places


def longest(waits: dict[LimitName, int]) -> tuple[LimitName | None, int]:
    """The limit that takes longest, of equal ones the first; (None, 0) when none is in the way."""
    if never := [name for name, wait in waits.items() if wait == NEVER]:
        return never[0], NEVER
    refused = max(waits, key=lambda name: waits[name], default=None)
    if refused is None or not waits[refused]:
        return None, 0
    return refused, waits[refused]
