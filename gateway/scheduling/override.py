"""What an admin says of a replica while the gateway runs, beside its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from gateway.scheduling.discovery import Target

MOST_WEIGHT = 1e6


class Override(NamedTuple):
    """In place of what is configured; None leaves that as it is."""

    weight: float | None = None
    drain: bool | None = None

    def of(self, target: Target) -> Target:
        weight = target.weight if self.weight is None else self.weight
        return target._replace(
            weight=weight, drain=target.drain if self.drain is None else self.drain
        )

    def facts(self) -> dict[str, float | bool]:
        """Without what is None."""
        facts: dict[str, float | bool] = {}
        if self.weight is not None:
            facts["weight"] = self.weight
        if self.drain is not None:
            facts["drain"] = self.drain
        return facts


Overrides = Mapping[str, Override]
"""By the endpoint of a replica, which of a configured name is an address."""


def read_override(facts: object) -> Override:
    """What `facts` made. Raises ValueError for anything else."""
    if not isinstance(facts, dict) or not facts or facts.keys() - {"weight", "drain"}:
        raise ValueError("not a weight and a drain")
    weight, drain = facts.get("weight"), facts.get("drain")
    if weight is not None:
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError("a weight that is no number")
        if not (math.isfinite(weight) and 0 <= weight <= MOST_WEIGHT):
            raise ValueError("a weight out of range")
        weight = float(weight)
    if drain is not None and not isinstance(drain, bool):
        raise ValueError("a drain that is neither true nor false")
    return Override(weight, drain)
