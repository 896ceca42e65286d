"""The list of nearly spent budgets, up to date and without past days or months."""

from __future__ import annotations

from gateway.tenancy.limits.budgets import BudgetReport, BudgetUsage


def _report(used: int, *, limit: int = 100, reset_ms: int = 60_000) -> BudgetReport:
    return BudgetReport("acme", "tokens_per_day", limit, used, 1, reset_ms, 0)


def test_a_budget_is_listed_from_80_percent_on_as_it_stands() -> None:
    standings = BudgetUsage()
    standings.update(_report(79))
    assert standings.nearly_used == {}
    for used in (80, 120):
        standings.update(_report(used))
        (text,) = standings.nearly_used.values()
        assert text == f"acme has used {used} of 100 tokens per day"
    standings.update(_report(120, limit=1000))  # an operator has raised the limit
    assert standings.nearly_used == {}


def test_a_budget_of_a_day_that_has_ended_is_not_listed() -> None:
    standings = BudgetUsage()
    standings.update(_report(100, reset_ms=0))
    assert standings.nearly_used == {}
