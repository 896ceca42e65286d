"""Limits counted by this process alone, with the same arithmetic as in Redis (`script.lua`).

A limit per minute has a sliding window that moves by full seconds: what was counted in second `s`
expires when second `s + 61` begins. A tenant can therefore not exceed the limit in any 60 seconds.
A token bucket, by contrast, would admit twice the limit in its first minute.

See decision 088 in docs/decisions.
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
    """Sliding window of one minute: the requests or tokens counted in each of the last seconds.

    A second is an integer: the clock's time in seconds, rounded down. The requests or tokens of a
    second expire one minute after this second.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def total(self, second: int) -> int:
        """Return the number of requests or tokens that have not expired in `second`.

        Also remove the expired ones from memory.
        """
        for old in [at for at in self._counts if at < second - WINDOW_S]:
            del self._counts[old]
        return sum(self._counts.values())

    def add(self, second: int, amount: int) -> None:
        self._counts[second] = self._counts.get(second, 0) + amount

    def wait_ms(self, now_ms: int, excess: int) -> int:
        """Return the milliseconds until at least `excess` requests or tokens have expired.

        Return BUSY_WAIT_MS if the window has fewer than `excess` requests or tokens. In this case,
        running requests have reserved tokens, and give them back at an unknown time.
        """
        if excess <= 0:
            return 0
        for second, amount in sorted(self._counts.items()):
            excess -= amount
            if excess <= 0:
                return _expiry_ms(second) - now_ms
        return BUSY_WAIT_MS

    def reset_ms(self, now_ms: int) -> int:
        """Return the milliseconds until all counted requests or tokens have expired."""
        return _expiry_ms(max(self._counts)) - now_ms if self._counts else 0


def _expiry_ms(second: int) -> int:
    return (second + WINDOW_S + 1) * 1000


@dataclass(slots=True)
class _Counts:
    windows: defaultdict[LimitName, Window] = field(default_factory=lambda: defaultdict(Window))
    slots: int = 0
    tokens: int = 0
    """Tokens reserved by running requests."""


class LocalLimits:
    """Counter of all tenants' limits in this process.

    Not thread-safe: use an instance on one event loop only. Budgets are not counted, because their
    counts would be lost at a restart.
    """

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        """Create an empty counter. `clock_ms` returns the monotonic time in milliseconds."""
        self._clock_ms = clock_ms
        self._tenants: defaultdict[str, _Counts] = defaultdict(_Counts)

    def take(self, request: LimitRequest) -> Decision:
        """Count the request if it fits all limits, and return the decision."""
        counts, now_ms = self._tenants[request.tenant], self._clock_ms()
        second = now_ms // 1000
        used: dict[LimitName, int] = {}
        waits: dict[LimitName, int] = {}
        for name, limit in request.limits.items():
            wanted, unit = request.amount_of(name), LIMITS[name].counts
            if unit == "slots":
                used[name] = counts.slots
            else:
                used[name] = counts.windows[name].total(second)
                used[name] += counts.tokens if unit == "tokens" else 0
            excess = used[name] + wanted - limit
            if wanted > limit:
                waits[name] = NEVER
            elif unit == "slots":
                waits[name] = BUSY_WAIT_MS if excess > 0 else 0
            else:
                waits[name] = counts.windows[name].wait_ms(now_ms, excess)
        refused, wait_ms = find_longest_wait(waits)
        if refused is None:
            for name in request.limits:
                used[name] += request.amount_of(name)
            self._count(counts, request, second)
        quotas: dict[str, Quota] = {}
        for name, limit in request.limits.items():
            reset_ms = counts.windows[name].reset_ms(now_ms)
            if LIMITS[name].counts == "tokens" and counts.tokens:
                reset_ms = _expiry_ms(second) - now_ms
            quotas[name] = Quota(limit, used[name], reset_ms)
        return Decision(refused, wait_ms, quotas, now_ms)

    def _count(self, counts: _Counts, request: LimitRequest, second: int) -> None:
        units = {LIMITS[name].counts for name in request.limits}
        counts.slots += request.slots if "slots" in units else 0
        counts.tokens += request.tokens if "tokens" in units else 0
        if "requests_per_minute" in request.limits:
            counts.windows["requests_per_minute"].add(second, request.requests)

    def settle(self, settlement: Settlement) -> None:
        """Count a request's used tokens now, and give back its unused tokens and its slots."""
        request, released, used, still_held, slots = settlement
        counts = self._tenants[request.tenant]
        counts.tokens += still_held - released
        if used and "tokens_per_minute" in request.limits:
            counts.windows["tokens_per_minute"].add(self._clock_ms() // 1000, used)
        counts.slots -= slots


def find_longest_wait(waits: dict[LimitName, int]) -> tuple[LimitName | None, int]:
    """Return the limit with the longest wait, and this wait.

    If several limits have the longest wait, return the first of them. Return (None, 0) if no limit
    requires a wait.

    Args:
        waits: the wait for each limit in milliseconds. NEVER means that the limit will never admit
            the request; it counts as the longest wait.
    """
    if never := [name for name, wait in waits.items() if wait == NEVER]:
        return never[0], NEVER
    refused = max(waits, key=lambda name: waits[name], default=None)
    if refused is None or not waits[refused]:
        return None, 0
    return refused, waits[refused]
