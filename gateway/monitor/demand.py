"""How much each tenant and each adapter has asked for, and what tenants were refused.

Names are only those that the configuration and the catalogue have had: what a client invents is
counted nowhere.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

_WINDOW_S = 60.0
RECENT_S = 300.0
"""For so long a refusal that needs somebody is not hidden by the client's own mistakes."""


@dataclass(slots=True)
class _Snapshot:
    at: float
    requests: Counter[str]
    tokens: Counter[str]
    adapter_requests: Counter[str]


@dataclass(frozen=True, slots=True)
class TenantRefusal:
    """`mistake`: the request itself was at fault, and nobody here need do anything."""

    at: float
    why: str
    mistake: bool = False


@dataclass(slots=True)
class TenantDemand:
    """What is asked a minute is what these have grown by since a minute ago."""

    requests: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    adapter_requests: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    """By the tenant, then the reason, of which there are a few dozen in all."""
    refusals: dict[str, TenantRefusal] = field(default_factory=dict)
    """The last one of each tenant; of a mistake, only where nothing else was lately."""
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
        """To be called every few seconds."""
        now = time.monotonic()
        self._snapshots.append(
            _Snapshot(now, self.requests.copy(), self.tokens.copy(), self.adapter_requests.copy())
        )
        while len(self._snapshots) > 1 and self._snapshots[1].at <= now - _WINDOW_S:
            self._snapshots.popleft()

    def per_minute(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Requests and tokens by tenant, and requests by adapter, each in a minute."""
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
