"""Connections to SQLite and to PostgreSQL, for functions that read or change rows.

These functions are coroutines for both databases:

- asyncpg suspends them in the event loop.
- In a thread with SQLite, `fetch` never suspends. `run_now` therefore runs the coroutine to its
  end.

The SQL is the same for both, with the placeholders of PostgreSQL: ``$1``, ``$2`` and so on. SQLite
accepts PostgreSQL's names of types, and stores values with the types that they have in Python.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

Value = int | float | str | bytes | None
Row = Sequence[Any]
"""The columns of a row, in the order of the statement."""


class Connection(ABC):
    """A connection to the database, valid until the function that got it returns.

    Changes are in one transaction. Reads are too with SQLite, but with PostgreSQL each statement
    sees what is committed at its start.

    Attributes:
        is_postgresql: True for PostgreSQL, False for SQLite.
    """

    is_postgresql: bool

    @abstractmethod
    async def fetch(self, sql: str, *values: Value) -> Sequence[Row]:
        """Execute one statement, and return the rows that it returns."""

    @abstractmethod
    async def execute_many(self, sql: str, rows: Sequence[Sequence[Value]]) -> None:
        """Execute one statement once for each row of values."""

    async def fetch_value(self, sql: str, *values: Value) -> Any:
        """Return the first column of the first row; None without a row."""
        rows = await self.fetch(sql, *values)
        return rows[0][0] if rows else None


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a function of the database has awaited something else")
