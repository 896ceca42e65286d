"""Handling of keywords that no compiler enforces.

A schema with such a keyword is refused, unless it is a best-effort schema. In a best-effort schema,
the keyword is left out instead. `Enforcement` gets the JSON paths of the best-effort schemas.

See decision 020 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from guides.releases import NEWEST, Costs
from guides.schema.keywords import refuse, step

# Number of left-out keywords whose JSON paths are reported. Further keywords are only counted.
_MAX_NAMED = 16
_MAX_COUNTED = 1000
_MAX_PATH_CHARS = 160
# Minimum compile time, in microseconds, of a bound (such as maxLength) that may be left out.
# Leaving out a cheaper bound would save too little time.
_MIN_BOUND_COST_US = 500

Bound = tuple[float, str]
"""A bound, such as maxLength: its compile time in microseconds, and its schema's JSON path."""


class Enforcement:
    """Policy for keywords that cannot be enforced.

    In schemas below the JSON paths `best_effort`, such a keyword is left out and reported. In other
    schemas, the keyword is refused. Without the keyword, the schema must allow at least the values
    that it allows with the keyword. The only exception is additionalProperties, for which the
    object may be closed instead.
    """

    def __init__(
        self,
        best_effort: Sequence[str] = (),
        costs: Costs = NEWEST,
        too_heavy: Container[Bound] = (),
    ) -> None:
        """Create the policy.

        Args:
            best_effort: JSON paths of the best-effort schemas.
            costs: costs of the xgrammar release in the engines.
            too_heavy: bounds of best-effort schemas that must be left out to save compile time.
        """
        self._best_effort = tuple(best_effort)
        self._too_heavy = too_heavy
        self.costs = costs
        self.bounds: dict[Bound, None] = {}
        """Bounds of best-effort schemas that may be left out to save compile time, as keys."""
        self._left_out: dict[str, None] = {}

    def leave_out(self, path: str, keyword: str, why: str = "") -> None:
        """Record that `keyword` of the schema at `path` is left out.

        Raise ValueError, with the message `why`, if the schema is not best effort.
        """
        if not self.is_best_effort(path):
            refuse(path, why or f"{keyword} is not supported")
        if len(self._left_out) < _MAX_COUNTED:
            found = step(path, keyword)
            if len(found) > _MAX_PATH_CHARS:
                found = f"{found[:_MAX_PATH_CHARS]}..."
            self._left_out[found] = None

    def is_best_effort(self, path: str) -> bool:
        return any(
            path.startswith(place) and path[len(place) : len(place) + 1] in ("", ".", "[")
            for place in self._best_effort
        )

    def is_too_heavy(self, cost: float, path: str) -> bool:
        """Return True if a bound of the schema at `path` must be left out to save compile time.

        `cost` is the bound's compile time in microseconds. The method also adds the bound to
        `bounds`, unless the bound is too cheap or its schema is not best effort.
        """
        if cost < _MIN_BOUND_COST_US or not self.is_best_effort(path):
            return False
        self.bounds[cost, path] = None
        return (cost, path) in self._too_heavy

    @property
    def left_out(self) -> tuple[str, ...]:
        """The JSON paths of the first keywords that were left out."""
        return tuple(self._left_out)[:_MAX_NAMED]

    @property
    def left_out_more(self) -> int:
        """Number of keywords that were left out in addition to those in `left_out`."""
        return max(0, len(self._left_out) - _MAX_NAMED)


STRICT = Enforcement()
