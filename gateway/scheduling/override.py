"""Overrides: weights and drain flags that admins set for replicas while the gateway runs.

An override takes precedence over the weight and the drain flag in the configuration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from gateway.scheduling.discovery import Target

MAX_WEIGHT = 1e6


class Override(NamedTuple):
    """A weight and a drain flag that replace the configured weight and drain flag of a replica.

    A field that is None does not replace the configured value.
    """

    weight: float | None = None
    drain: bool | None = None

    def apply_to(self, target: Target) -> Target:
        """Return a copy of `target` with the values of this override."""
        weight = target.weight if self.weight is None else self.weight
        return target._replace(
            weight=weight, drain=target.drain if self.drain is None else self.drain
        )

    def to_dict(self) -> dict[str, float | bool]:
        """Return a dictionary of the fields that are not None. Its keys are the field names."""
        facts: dict[str, float | bool] = {}
        if self.weight is not None:
            facts["weight"] = self.weight
        if self.drain is not None:
            facts["drain"] = self.drain
        return facts


Overrides = Mapping[str, Override]
"""Overrides by replica endpoint. A configured DNS name has one key for each of its addresses."""


def parse_override(facts: object) -> Override:
    """Parse a dictionary that `Override.to_dict` returned.

    Raise ValueError if `facts` is empty, has other keys, or has an invalid value.
    """
    if not isinstance(facts, dict) or not facts or facts.keys() - {"weight", "drain"}:
        raise ValueError("not a weight and a drain")
    weight, drain = facts.get("weight"), facts.get("drain")
    if weight is not None:
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError("a weight that is no number")
        if not (math.isfinite(weight) and 0 <= weight <= MAX_WEIGHT):
            raise ValueError("a weight out of range")
        weight = float(weight)
    if drain is not None and not isinstance(drain, bool):
        raise ValueError("a drain that is neither true nor false")
    return Override(weight, drain)
