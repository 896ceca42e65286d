"""Requests to a tenant's limits, and decisions. Both counters, local and Redis, use them."""

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
"""Indices of the units that limits count."""
_UNIT_BY_WORD: Mapping[Counted, int] = {"requests": REQUESTS, "tokens": TOKENS, "slots": SLOTS}
UNITS: Mapping[LimitName, int] = {name: _UNIT_BY_WORD[kind.counts] for name, kind in LIMITS.items()}
_NO_BUDGETS: Mapping[LimitName, int] = MappingProxyType({})
BUSY_WAIT_MS = 1000
"""Retry time if the wait depends on when a running request ends, which is unknown."""


@dataclass(slots=True, kw_only=True)
class LimitRequest:
    """Units that a request of `tenant` asks for, and its `limits`."""

    tenant: str
    limits: Mapping[LimitName, int]
    budgets: Mapping[LimitName, int] = field(default_factory=lambda: _NO_BUDGETS)
    """The limits over a day or a month."""
    requests: int = 1
    tokens: int = 0
    slots: int = 0

    def amount_of(self, limit: LimitName) -> int:
        """Return the units that the request asks for of a limit."""
        wanted: int = getattr(self, LIMITS[limit].counts)
        return wanted


class RequestUnits(NamedTuple):
    """The limits of a request, each with its unit and True for a budget, and the set of units."""

    limits: tuple[tuple[LimitName, int, bool], ...]
    units: frozenset[int]


def units_of_request(request: LimitRequest) -> RequestUnits:
    return _units_of_limits(tuple(request.limits))


@cache
def _units_of_limits(names: tuple[LimitName, ...]) -> RequestUnits:
    limits = tuple([(name, UNITS[name], LIMITS[name].budget) for name in names])
    return RequestUnits(limits, frozenset([unit for _, unit, _ in limits]))


class Decision(NamedTuple):
    """A counter's answer to a request.

    Attributes:
        refused: the limit with the longest wait; None if the request is admitted.
        wait_ms: milliseconds until the request could pass, or NEVER.
        quotas: the limits that were asked, with the request counted if it was admitted.
        now_ms: time of the decision, by the counter's clock.
    """

    refused: LimitName | None
    wait_ms: int
    quotas: Mapping[str, Quota]
    now_ms: int


class Settlement(NamedTuple):
    """Units that a request gives back, at its end or while it runs.

    Attributes:
        request: the request that took them.
        released: tokens that it held until now.
        used: tokens of those that were used by now.
        still_held: tokens of those that it holds on to.
        slots: slots that are free again.
    """

    request: LimitRequest
    released: int = 0
    used: int = 0
    still_held: int = 0
    slots: int = 0


class Spending(NamedTuple):
    """Further tokens used of a tenant's `budgets`."""

    tenant: str
    budgets: Mapping[LimitName, int]
    tokens: int
