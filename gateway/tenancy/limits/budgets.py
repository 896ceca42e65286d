"""Usage of tenants' budgets, as reported to this process.

See decision 092 in docs/decisions.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from gateway.config.limits import LimitName

log = logging.getLogger(__name__)

_WARN_AT = 0.8


class BudgetReport(NamedTuple):
    """Usage of a budget in Redis: `used` of `limit`, of which `counted` came with this call."""

    tenant: str
    name: LimitName
    limit: int
    used: int
    counted: int
    reset_ms: int


class BudgetUsage:
    """Last known usage of budgets. Written from the thread that calls Redis, read from any.

    Usage only grows until a period ends, so each process knows a lower bound. The process that
    counted last knows the exact value, so the greatest bound is right.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, LimitName], tuple[int, float]] = {}
        """Usage, and the end of its period in the time of `time.monotonic`."""
        self._nearly_used: dict[str, tuple[str, float]] = {}

    def update(self, report: BudgetReport) -> None:
        """Store a report, and warn if this call brought a budget to 80 %.

        Only one call of all gateways crosses that line, so there is one warning.
        """
        tenant, name, limit, used, counted, reset_ms = report
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
        """Texts of budgets that are used to 80 % or more, by budget."""
        now, known = time.monotonic(), self._nearly_used.copy()
        return {budget: words for budget, (words, ends) in known.items() if ends > now}

    def used_of(self, tenant: str, name: LimitName) -> int | None:
        """Return the usage in the current period, None if it is unknown."""
        standing = self.used_and_reset(tenant, name)
        return None if standing is None else standing[0]

    def used_and_reset(self, tenant: str, name: LimitName) -> tuple[int, int] | None:
        """Return the usage and the milliseconds until its period ends, None if it is unknown."""
        used, ends = self._known.get((tenant, name), (0, 0.0))
        left = ends - time.monotonic()
        return (used, int(left * 1000)) if left > 0 else None
