"""Limits counted by this process alone, by the same arithmetic as in Redis (`script.lua`).

A window slides by whole seconds: what was counted in second s is gone when second s + 61 begins, so
in no 60 seconds does more pass than the limit allows. (A token bucket would let twice as much pass
in its first minute.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.tenancy.limits.request import (
    BUSY_WAIT_MS,
    NEVER,
    WINDOW_S,
    Decision,
    LimitName,
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
    requests: Window = field(default_factory=Window)
    tokens: Window = field(default_factory=Window)
    running: int = 0


class LocalLimits:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Counts] = {}

    def take(self, request: LimitRequest, now_ms: int) -> Decision:
        """Counts the request if no limit is in its way. `now_ms` never goes back."""
        counts = self._tenants.setdefault(request.tenant, _Counts())
        second = now_ms // 1000
        requests, tokens = counts.requests.total(second), counts.tokens.total(second)
        waits: dict[LimitName, int] = {}
        if request.requests is not None:
            excess = requests + 1 - request.requests
            waits["requests_per_minute"] = counts.requests.wait_ms(now_ms, excess)
        if request.tokens is not None:
            excess = tokens + request.wanted - request.tokens
            waits["tokens_per_minute"] = counts.tokens.wait_ms(now_ms, excess)
        if request.concurrent is not None and counts.running + request.places > request.concurrent:
            never = request.places > request.concurrent
            waits["concurrent_requests"] = NEVER if never else BUSY_WAIT_MS
        refused, wait_ms = longest(waits)
        if refused is None:
            if request.requests is not None:
                counts.requests.add(second, 1)
                requests += 1
            if request.tokens is not None:
                counts.tokens.add(second, request.wanted)
                tokens += request.wanted
            if request.concurrent is not None:
                counts.running += request.places
        return Decision(
            refused=refused,
            wait_ms=wait_ms,
            remaining_requests=max(0, (request.requests or 0) - requests),
            reset_requests_ms=counts.requests.reset_ms(now_ms),
            remaining_tokens=max(0, (request.tokens or 0) - tokens),
            reset_tokens_ms=counts.tokens.reset_ms(now_ms),
            now_ms=now_ms,
        )

    def settle(self, settlement: Settlement) -> None:
        counts = self._tenants[settlement.tenant]
        counts.tokens.release(settlement.since, settlement.released)
        if settlement.counted:
            counts.tokens.add(settlement.at, settlement.counted)
        counts.running -= settlement.places


def longest(waits: dict[LimitName, int]) -> tuple[LimitName | None, int]:
    """The limit that takes longest, of equal ones the first; (None, 0) when none is in the way."""
    if never := [name for name, wait in waits.items() if wait == NEVER]:
        return never[0], NEVER
    refused = max(waits, key=lambda name: waits[name], default=None)
    if refused is None or not waits[refused]:
        return None, 0
    return refused, waits[refused]
