"""Requests and tokens per minute of each tenant and adapter, and refused requests of tenants.

Only tenants of the configuration and adapters of the catalogue are counted, so memory is bounded.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass, field

_WINDOW_S = 60.0
RECENT_S = 300.0
"""Seconds for which a tenant's refused valid request is shown instead of a later invalid one.

An operator may have to react to the refusal of a valid request, for example by raising a limit.
Refusals of invalid requests need no reaction, so they must not hide a recent valid request.
"""


@dataclass(slots=True)
class _Snapshot:
    at: float
    requests: Counter[str]
    tokens: Counter[str]
    adapter_requests: Counter[str]


@dataclass(frozen=True, slots=True)
class TenantRefusal:
    """A request of a tenant that was refused.

    Attributes:
        at: time of the refusal in seconds since 1970.
        why: short reason of the refusal, such as the name of the exceeded limit.
        mistake: True if the request was invalid, so no operator needs to act.
    """

    at: float
    why: str
    mistake: bool = False


@dataclass(slots=True)
class TenantDemand:
    """Counters of requests and tokens, by tenant or by adapter.

    `per_minute` returns how much the counters have grown in the last minute.
    """

    requests: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    adapter_requests: Counter[str] = field(default_factory=Counter)
    refused: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of refused requests, by tenant and reason. There are a few dozen reasons."""
    refusals: dict[str, TenantRefusal] = field(default_factory=dict)
    """The refused request that the console shows for each tenant.

    It is the last refused request, with one exception: an invalid request does not replace a valid
    request that was refused less than `RECENT_S` seconds before.
    """
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
        """Store a copy of the counters, from which `per_minute` computes the rates.

        Call this every few seconds.
        """
        now = time.monotonic()
        self._snapshots.append(
            _Snapshot(now, self.requests.copy(), self.tokens.copy(), self.adapter_requests.copy())
        )
        while len(self._snapshots) > 1 and self._snapshots[1].at <= now - _WINDOW_S:
            self._snapshots.popleft()

    def per_minute(self) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        """Return (requests by tenant, tokens by tenant, requests by adapter), each per minute."""
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
