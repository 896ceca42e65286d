"""Demand of each tenant and adapter, and refusals of tenants.

Names come only from the configuration and the catalogue; names invented by clients are not counted.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

_WINDOW_S = 60.0
RECENT_S = 300.0
"""Period in which a client's own mistakes do not hide a refusal that needs an operator."""


@dataclass(slots=True)
class _Snapshot:
    at: float
    requests: Counter[str]
    tokens: Counter[str]
    adapter_requests: Counter[str]


@dataclass(frozen=True, slots=True)
class TenantRefusal:
    """A refusal. `mistake` is True if the request itself was at fault, so no operator needs to
    act."""

    at: float
    why: str
    mistake: bool = False


@dataclass(slots=True)
class TenantDemand:
    """Demand of tenants and adapters. A rate per minute is the growth of a counter in the last
    minute."""

    requests: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    adapter_requests: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    """Counts by tenant, then by reason, of which a few dozen exist."""
    refusals: dict[str, TenantRefusal] = field(default_factory=dict)
    """The last refusal of each tenant; a client's mistake only without a recent other refusal."""
    _snapshots: deque[_Snapshot] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.step()

    def count_refusal(
        self, tenant: str, why: str, *, mistake: bool = False, times: int = 1
    ) -> None:
        self.refused.setdefault(tenant, Counter())[why] += times
        now, last = round(time.time(), 2), self.refusals.get(tenant)
        if mistake and last is not None and not last.mistake and now - last.at < RECENT_S:
            return
        self.refusals[tenant] = TenantRefusal(now, why, mistake)

    def step(self) -> None:
        """Take a snapshot of the counters. Call it every few seconds."""
        now = time.monotonic()
        self._snapshots.append(
            _Snapshot(now, self.requests.copy(), self.tokens.copy(), self.adapter_requests.copy())
        )
        while len(self._snapshots) > 1 and self._snapshots[1].at <= now - _WINDOW_S:
            self._snapshots.popleft()

    def per_minute(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Return requests and tokens by tenant, and requests by adapter, each per minute."""
        then = self._snapshots[0]
        minutes = max(time.monotonic() - then.at, _WINDOW_S) / 60
        return (
            _rates(then.requests, self.requests, minutes),
            _rates(then.tokens, self.tokens, minutes),
            _rates(then.adapter_requests, self.adapter_requests, minutes),
        )


def _rates(before: Counter[str], now: Counter[str], minutes: float) -> dict[str, float]:
    return {
        name: round((count - before[name]) / minutes, 1)
        for name, count in now.items()
        if count > before[name]
    }
