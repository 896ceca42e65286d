"""Limits counted by this process alone, by the same arithmetic as in Redis (`script.lua`).

A window slides by whole seconds: what was counted in second s is gone when second s + 61 begins, so
in no 60 seconds does more pass than the limit allows. (A token bucket would let twice as much pass
in its first minute.)
"""

from __future__ import annotations

from collections import defaultdict
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

    def release(self, second: int, amount: int) -> None:
        """So much of what was counted then counts no more, unless it is forgotten anyway."""
        if second in self._counts:
            self._counts[second] = max(0, self._counts[second] - amount)

    def wait_ms(self, now_ms: int, excess: int) -> int:
        """Until at least `excess` of what counts now counts no more; NEVER if it is less."""
        if excess <= 0:
            return 0
        for second, amount in sorted(self._counts.items()):
            excess -= amount
            if excess <= 0:
                return _gone_ms(second) - now_ms
        return NEVER

    def reset_ms(self, now_ms: int) -> int:
        """Until nothing counts."""
        return _gone_ms(max(self._counts)) - now_ms if self._counts else 0


def _gone_ms(second: int) -> int:
    return (second + WINDOW_S + 1) * 1000


@dataclass(slots=True)
class _Counts:
    windows: defaultdict[LimitName, Window] = field(default_factory=lambda: defaultdict(Window))
    running: int = 0


class LocalLimits:
    """Belongs to one event loop. It counts no budgets: they would be forgotten at its end."""

    def __init__(self) -> None:
        self._tenants: defaultdict[str, _Counts] = defaultdict(_Counts)

    def take(self, request: LimitRequest, now_ms: int) -> Decision:
        """Counts the request if no limit is in its way. `now_ms` never goes back."""
        counts = self._tenants[request.tenant]
        second = now_ms // 1000
        used: dict[LimitName, int] = {}
        waits: dict[LimitName, int] = {}
        for name, limit in request.limits.items():
            wanted = request.wanted(name)
            if LIMITS[name].counts == "places":
                used[name] = counts.running
                if counts.running + wanted > limit:
                    waits[name] = NEVER if wanted > limit else BUSY_WAIT_MS
            else:
                window = counts.windows[name]
                used[name] = window.total(second)
                waits[name] = window.wait_ms(now_ms, used[name] + wanted - limit)
        refused, wait_ms = longest(waits)
        quotas: dict[str, Quota] = {}
        for name, limit in request.limits.items():
            if refused is None:
                wanted = request.wanted(name)
                used[name] += wanted
                if LIMITS[name].counts == "places":
                    counts.running += wanted
                else:
                    counts.windows[name].add(second, wanted)
            quotas[name] = Quota(limit, used[name], counts.windows[name].reset_ms(now_ms))
        return Decision(refused, wait_ms, quotas, now_ms)

    def settle(self, settlement: Settlement) -> None:
        request, since, released, at, used, kept, places = settlement
        counts = self._tenants[request.tenant]
        for name in request.limits:
            if LIMITS[name].counts == "tokens":
                counts.windows[name].release(since, released)
                if used + kept:
                    counts.windows[name].add(at, used + kept)
        counts.running -= places


def longest(waits: dict[LimitName, int]) -> tuple[LimitName | None, int]:
    """The limit that takes longest, of equal ones the first; (None, 0) when none is in the way."""
    if never := [name for name, wait in waits.items() if wait == NEVER]:
        return never[0], NEVER
    refused = max(waits, key=lambda name: waits[name], default=None)
    if refused is None or not waits[refused]:
        return None, 0
    return refused, waits[refused]
