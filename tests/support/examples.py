"""How many examples a property gets, by hypothesis's profile."""

from __future__ import annotations

from typing import Any

import hypothesis

_EXAMPLES = {"check": 10, "gate": 40, "nightly": 1000}
"""Examples of a property, by profile: for `make check`, for `.ci/run`, and for each night."""


def load_profile() -> None:
    """Register the profiles and load `gate`; `--hypothesis-profile` takes another."""
    for name, count in _EXAMPLES.items():
        hypothesis.settings.register_profile(
            name,
            # An example's time says nothing about the code on a busy machine.
            deadline=None,
            max_examples=count,
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
        )
    hypothesis.settings.load_profile("gate")


def scale_examples(factor: float, **more: Any) -> hypothesis.settings:
    """Return settings for `factor` times as many examples as the profile has."""
    count = round(factor * hypothesis.settings().max_examples)
    return hypothesis.settings(max_examples=count, **more)
