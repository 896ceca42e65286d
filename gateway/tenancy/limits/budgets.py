"""Usage of tenants' budgets (tokens per day or month), as last reported by Redis.

See decision 092 in docs/decisions.
"""

from __future__ import annotations

import logging
import time
from datetime import date, timedelta
from typing import NamedTuple

from gateway.config.limits import LimitName

log = logging.getLogger(__name__)

_WARN_AT = 0.8
_EPOCH = date(1970, 1, 1)


class BudgetReport(NamedTuple):
    """Usage of a tenant's budget in Redis, as returned by a call of the Lua script `script.lua`.

    Attributes:
        tenant: the tenant's name.
        name: the budget: `tokens_per_day` or `tokens_per_month`.
        limit: maximum number of tokens in the day or month.
        used: number of tokens that all gateways have used in this day or month.
        counted: number of tokens that the call has added to `used`.
        reset_ms: milliseconds until the period ends.
        first_day: first day of the period, in days since 1970.
    """

    tenant: str
    name: LimitName
    limit: int
    used: int
    counted: int
    reset_ms: int
    first_day: int


class BudgetTotal(NamedTuple):
    """Usage of a budget in one period.

    Attributes:
        name: the budget: `tokens_per_day` or `tokens_per_month`.
        first_day: first day of the period, in days since 1970.
        used: number of tokens that all gateways have used in the period.
    """

    name: LimitName
    first_day: int
    used: int


def find_first_day(name: LimitName, end: int) -> int:
    """Return the first day of a budget's period that ends before the day `end`.

    Days are counted from 1970, in UTC.
    """
    last = _EPOCH + timedelta(days=end - 1)
    return ((last if name == "tokens_per_day" else last.replace(day=1)) - _EPOCH).days


class BudgetUsage:
    """Last known usage of each tenant's budgets. Can be read from any thread.

    A process knows the usage at its own last call to Redis. Other processes may have used tokens
    since then, so the present usage may be higher. Within a day or month, usage only grows. The
    highest usage that any process knows is therefore the latest one.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, LimitName], tuple[int, float]] = {}
        """Used tokens, and the time at which the day or month ends, by tenant and budget.

        The time is in seconds of `time.monotonic`.
        """
        self._nearly_used: dict[str, tuple[str, float]] = {}

    def update(self, report: BudgetReport) -> None:
        """Store a report of Redis. Log a warning if the usage has just exceeded 80 % of the limit.

        Only one call among the calls of all gateways raises the usage above 80 %, so only one
        gateway logs the warning, once per day or month.
        """
        tenant, name, limit, used, counted, reset_ms, _ = report
        ends = time.monotonic() + reset_ms / 1000
        self._known[tenant, name] = used, ends
        if used >= _WARN_AT * limit:
            words = f"{tenant} has used {used} of {limit} {name.replace('_', ' ')}"
            self._nearly_used[f"{tenant} {name}"] = words, ends
        else:
            self._nearly_used.pop(f"{tenant} {name}", None)
        if used - counted < _WARN_AT * limit <= used:
            log.warning(
                "%s has used %d of %d %s (%.0f %%)",
                *(tenant, used, limit, name.replace("_", " "), 100 * used / limit),
            )

    @property
    def nearly_used(self) -> dict[str, str]:
        """Warning texts for budgets that are at least 80 % used.

        A key is the tenant's name, a space, and the budget's name: "acme tokens_per_day".
        """
        now, known = time.monotonic(), self._nearly_used.copy()
        return {budget: words for budget, (words, ends) in known.items() if ends > now}

    def used_of(self, tenant: str, name: LimitName) -> int | None:
        """Return the tokens used in the current period. Return None if the usage is unknown."""
        standing = self.used_and_reset(tenant, name)
        return None if standing is None else standing[0]

    def used_and_reset(self, tenant: str, name: LimitName) -> tuple[int, int] | None:
        """Return the tokens used in the current period, and the milliseconds until it ends.

        Return None if the usage is unknown.
        """
        used, ends = self._known.get((tenant, name), (0, 0.0))
        left = ends - time.monotonic()
        return (used, int(left * 1000)) if left > 0 else None
