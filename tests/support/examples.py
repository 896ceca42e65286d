"""Number of examples per property test, by hypothesis profile."""

from __future__ import annotations

from typing import Any

import hypothesis

_EXAMPLES = {"check": 10, "gate": 40, "nightly": 1000}
"""Examples per profile: `check` for `make check`, `gate` for `.ci/run`, `nightly` for nights."""


def load_profile() -> None:
    """Register the profiles and load `gate`. The option `--hypothesis-profile` selects another."""
    for name, count in _EXAMPLES.items():
        hypothesis.settings.register_profile(
            name,
            # On a busy machine, the time of an example says nothing about the code.
            deadline=None,
            max_examples=count,
            suppress_health_check=[hypothesis.HealthCheck.too_slow],
        )
    hypothesis.settings.load_profile("gate")


def scale_examples(factor: float, **more: Any) -> hypothesis.settings:
    """Return settings with `factor` times the profile's number of examples."""
    count = round(factor * hypothesis.settings().max_examples)
    return hypothesis.settings(max_examples=count, **more)
