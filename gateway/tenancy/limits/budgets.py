"""Where tenants stand with their budgets, as far as this process was told."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from gateway.config.limits import LimitName

log = logging.getLogger(__name__)

_WARN_AT = 0.8


class BudgetReport(NamedTuple):
    """What Redis says of a budget: `used` of `limit`, of which `counted` came with this call."""

    tenant: str
    name: LimitName
    limit: int
    used: int
    counted: int
    reset_ms: int


class Standings:
    """Written from the thread that talks to Redis, read from any.

    What is used only grows until a window ends. So each process knows a lower bound, the one that
    counted last knows all, and the greatest of them is true.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, LimitName], tuple[int, float]] = {}
        """What is used, and when that ends, in the time of `time.monotonic`."""
        self._nearly_used: dict[str, tuple[str, float]] = {}

    def told(self, report: BudgetReport) -> None:
        """Warns when this call brought a budget to 80 %: of all gateways' calls, one does."""
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
        """Texts by budget, of budgets of which 80 % are used."""
        now, known = time.monotonic(), self._nearly_used.copy()
        return {budget: words for budget, (words, ends) in known.items() if ends > now}

    def used(self, tenant: str, name: LimitName) -> int | None:
        """In the day or month that is now; None where nothing was told of it."""
        standing = self.standing(tenant, name)
        return None if standing is None else standing[0]

    def standing(self, tenant: str, name: LimitName) -> tuple[int, int] | None:
        """As `used`, with the milliseconds until the day or month ends."""
        used, ends = self._known.get((tenant, name), (0, 0.0))
        left = ends - time.monotonic()
        return (used, int(left * 1000)) if left > 0 else None
