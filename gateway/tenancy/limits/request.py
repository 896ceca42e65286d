"""What is asked of a tenant's limits, and what they say. Both counters, local and Redis, use it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.config.limits import LIMITS, LimitName
from gateway.errors import Quota

WINDOW_S = 60
NEVER = -1
BUSY_WAIT_MS = 1000
"""Nobody knows when a running request ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRequest:
    """What a request of `tenant` asks for of each of its `limits` that counts such things."""

    tenant: str
    limits: Mapping[LimitName, int]
    budgets: Mapping[LimitName, int] = field(default_factory=dict)
    """Of the limits, those over a day or a month."""
    requests: int = 1
    tokens: int = 0
    places: int = 0

    def wanted(self, limit: LimitName) -> int:
        wanted: int = getattr(self, LIMITS[limit].counts)
        return wanted


class Decision(NamedTuple):
    """Times are in milliseconds from now.

    `refused` names the limit that takes longest, and `wait_ms` is when the request could pass, or
    NEVER. `quotas` are the limits that were asked, with the request where it was let in. `now_ms`
    is when it was counted, by the counter's clock.
    """

    refused: LimitName | None
    wait_ms: int
    quotas: Mapping[str, Quota]
    now_ms: int


class Settlement(NamedTuple):
    """Of the tokens that `request` holds, `released` are held no more.

    `used` of them were used by now, and `kept` are held on. `places` are free again.
    """

    request: LimitRequest
    released: int = 0
    used: int = 0
    kept: int = 0
    places: int = 0


class Spending(NamedTuple):
    """So many tokens more of a tenant's `budgets` were used."""

    tenant: str
    budgets: Mapping[LimitName, int]
    tokens: int
