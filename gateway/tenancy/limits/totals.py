"""Usage of the budgets in the database.

Redis counts the tokens, and each process knows the totals that Redis has reported to it. The
processes write the totals to the database, and name them in each call of Redis. If Redis has lost
its data, its counts therefore continue where they were. A total only grows within its period, so
the highest one is right.

See decision 092 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from gateway.config.limits import LIMITS, LimitName
from gateway.database.connection import Connection
from gateway.database.database import Database
from gateway.errors import DatabaseUnavailable
from gateway.tenancy.limits.budgets import BudgetReport, BudgetTotal
from gateway.troubles import Troubles

_INTERVAL_S = 5.0
_DAY_S = 24 * 3600

Totals = dict[str, dict[LimitName, BudgetTotal]]
"""Known totals by tenant and budget."""


class BudgetTotals:
    """The highest known usage of each budget, in this process and in the database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: Totals = defaultdict(dict)
        self._changed: set[tuple[str, LimitName]] = set()
        self._is_loaded = False

    def update(self, report: BudgetReport) -> None:
        """Store the usage that Redis has reported."""
        total = BudgetTotal(report.name, report.first_day, report.used)
        if self._store_higher(report.tenant, total):
            self._changed.add((report.tenant, report.name))

    def get_totals(self, tenant: str) -> Sequence[BudgetTotal]:
        """Return the last known usage of each budget of a tenant."""
        known = self._known.get(tenant)
        return () if known is None else [*known.values()]

    async def follow(self, troubles: Troubles) -> None:
        """Load the totals, and write changed ones every 5 s, until cancelled."""
        while True:
            try:
                await self.try_synchronize()  # the database reports its problem itself
            except Exception as error:  # continue after any error
                text = f"what was used of budgets is not in the database: {error!r}"
                troubles.hold("budget_totals", logging.ERROR, text, exc_info=True)
            else:
                troubles.clear("budget_totals")
            await asyncio.sleep(_INTERVAL_S)

    async def try_synchronize(self) -> None:
        """Call `synchronize`. Do nothing if the database is unavailable."""
        with suppress(DatabaseUnavailable):
            await self.synchronize()

    async def synchronize(self) -> None:
        """Load the totals once, and write those that have changed.

        Raise DatabaseUnavailable if that is impossible now. The next call writes them then.
        """
        if not self._is_loaded:
            for tenant, total in await self._database.read(_read_totals):
                self._store_higher(tenant, total)
            self._is_loaded = True
        if changed := sorted(self._changed):
            totals = [(tenant, self._known[tenant][name]) for tenant, name in changed]
            self._changed.clear()
            try:
                await self._database.write(partial(_write_totals, totals=totals))
            except BaseException:
                self._changed.update(changed)
                raise

    def _store_higher(self, tenant: str, total: BudgetTotal) -> bool:
        """Store a total unless a higher one is known. Return True if it was stored.

        A total of a future period is ignored: the clock of Redis is wrong, or was wrong.
        """
        if total.first_day > _get_last_day():
            return False
        known = self._known[tenant].get(total.name)
        if known is not None and known[1:] >= total[1:]:
            return False
        self._known[tenant][total.name] = total
        return True


async def _read_totals(connection: Connection) -> list[tuple[str, BudgetTotal]]:
    rows = await connection.fetch("SELECT tenant, name, first_day, used FROM budget_totals")
    # A newer release may have budgets that this one does not know.
    return [(tenant, BudgetTotal(*total)) for tenant, *total in rows if total[0] in LIMITS]


async def _write_totals(connection: Connection, totals: Sequence[tuple[str, BudgetTotal]]) -> None:
    await connection.execute_many(
        "INSERT INTO budget_totals (tenant, name, first_day, used) VALUES ($1, $2, $3, $4)"
        " ON CONFLICT (tenant, name) DO UPDATE"
        " SET first_day = excluded.first_day, used = excluded.used"
        " WHERE (budget_totals.first_day, budget_totals.used)"
        " < (excluded.first_day, excluded.used) OR budget_totals.first_day > $5",
        [(tenant, *total, _get_last_day()) for tenant, total in totals],
    )


def _get_last_day() -> int:
    """Return the last day that a period can begin with, in days since 1970.

    Clocks may differ by a day.
    """
    return int(time.time()) // _DAY_S + 1
