"""What is asked of a tenant's limits, and what they say. Both counters, local and Redis, use it."""

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
REQUESTS, TOKENS, PLACES = range(3)
"""The units that limits count, by their index in lists."""
_UNIT_BY_WORD: Mapping[Counted, int] = {"requests": REQUESTS, "tokens": TOKENS, "places": PLACES}
UNITS: Mapping[LimitName, int] = {name: _UNIT_BY_WORD[kind.counts] for name, kind in LIMITS.items()}
_NO_BUDGETS: Mapping[LimitName, int] = MappingProxyType({})
BUSY_WAIT_MS = 1000
"""Nobody knows when a running request ends."""


@dataclass(slots=True, kw_only=True)
class LimitRequest:
    """What a request of `tenant` asks for of each of its `limits` that counts such things."""

    tenant: str
    limits: Mapping[LimitName, int]
    budgets: Mapping[LimitName, int] = field(default_factory=lambda: _NO_BUDGETS)
    """Of the limits, those over a day or a month."""
    requests: int = 1
    tokens: int = 0
    places: int = 0

    def wanted(self, limit: LimitName) -> int:
        wanted: int = getattr(self, LIMITS[limit].counts)
        return wanted


class Kinds(NamedTuple):
    """The limits of a request: each with its unit and whether it is a budget, and their units."""

    limits: tuple[tuple[LimitName, int, bool], ...]
    units: frozenset[int]


def kinds_of(request: LimitRequest) -> Kinds:
    return _kinds(tuple(request.limits))


@cache
def _kinds(names: tuple[LimitName, ...]) -> Kinds:
    limits = tuple([(name, UNITS[name], LIMITS[name].budget) for name in names])
    return Kinds(limits, frozenset([unit for _, unit, _ in limits]))


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
    """Units that a request gives back, at its end or while it runs.

    Attributes:
        request: what was taken.
        released: tokens that it held until now.
        used: tokens of those that were used by now.
        kept: tokens of those that it holds on.
        places: slots that are free again.
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
