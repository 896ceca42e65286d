"""Arguments and results of the two counters of limits: `LocalLimits` and `SharedLimits` (Redis)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

from gateway.config.limits import LIMITS, Counted, LimitName
from gateway.errors import Quota

WINDOW_S = 60
NEVER = -1
REQUESTS, TOKENS, SLOTS = range(3)
"""Indices of the three units that limits count. A slot is one concurrent request."""
_UNIT_BY_WORD: Mapping[Counted, int] = {"requests": REQUESTS, "tokens": TOKENS, "slots": SLOTS}
UNITS: Mapping[LimitName, int] = {name: _UNIT_BY_WORD[kind.counts] for name, kind in LIMITS.items()}
_NO_BUDGETS: Mapping[LimitName, int] = MappingProxyType({})
BUSY_WAIT_MS = 1000
"""Milliseconds after which a client may retry a request that other running requests block.

The time at which those requests end is unknown, so this is only a suggestion.
"""


@dataclass(slots=True, kw_only=True)
class LimitRequest:
    """Numbers of requests, tokens and slots to count for a tenant, if all `limits` allow it."""

    tenant: str
    limits: Mapping[LimitName, int]
    budgets: Mapping[LimitName, int] = field(default_factory=lambda: _NO_BUDGETS)
    """All budgets of the tenant: limits of tokens per day or month."""
    requests: int = 1
    tokens: int = 0
    slots: int = 0

    def amount_of(self, limit: LimitName) -> int:
        """Return how many requests, tokens or slots to count in `limit`."""
        wanted: int = getattr(self, LIMITS[limit].counts)
        return wanted


class RequestUnits(NamedTuple):
    """Limits that apply to a request, and the units that these limits count.

    Attributes:
        limits: for each limit: its name, its unit, and True if the limit is a budget. The unit is
            REQUESTS, TOKENS or SLOTS.
        units: all units that occur in `limits`.
    """

    limits: tuple[tuple[LimitName, int, bool], ...]
    units: frozenset[int]


def units_of_request(request: LimitRequest) -> RequestUnits:
    return _units_of_limits(tuple(request.limits))


@cache
def _units_of_limits(names: tuple[LimitName, ...]) -> RequestUnits:
    limits = tuple([(name, UNITS[name], LIMITS[name].budget) for name in names])
    return RequestUnits(limits, frozenset([unit for _, unit, _ in limits]))


class Decision(NamedTuple):
    """Decision to admit or refuse a request.

    Attributes:
        refused: name of the exceeded limit with the longest wait; None if the request is admitted.
        wait_ms: milliseconds until the request could be admitted, or NEVER.
        quotas: usage of the request's limits, including the request if it is admitted.
        now_ms: time of the decision in milliseconds of the counter's clock.
    """

    refused: LimitName | None
    wait_ms: int
    quotas: Mapping[str, Quota]
    now_ms: int


class Settlement(NamedTuple):
    """Change of the tokens and slots that a request holds, while the request runs or at its end.

    The tokens in `released` were reserved until now. Of these, `used` tokens are counted as used,
    `still_held` tokens remain reserved, and the others are given back.

    Attributes:
        request: the request for which the tokens and slots were taken.
        released: number of tokens that were reserved until now.
        used: number of tokens that count as used from now on.
        still_held: number of tokens that remain reserved.
        slots: number of slots that the request gives back.
    """

    request: LimitRequest
    released: int = 0
    used: int = 0
    still_held: int = 0
    slots: int = 0


class Spending(NamedTuple):
    """Number of used tokens that must be added to all budgets of a tenant."""

    tenant: str
    budgets: Mapping[LimitName, int]
    tokens: int
