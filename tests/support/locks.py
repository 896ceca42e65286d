"""Pins of the lock files in requirements/."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]


@cache
def read_lock(name: str) -> dict[str, list[tuple[Requirement, int]]]:
    """Return package -> its pins (one for each set of environments) with the number of hashes."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8")
    pins: dict[str, list[tuple[Requirement, int]]] = {}
    lines = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", "", "\n".join(lines)).splitlines():
        pin, *hashes = line.split("--hash=sha256:")
        assert all(re.fullmatch(r"[0-9a-f]{64}", found.strip()) for found in hashes), pin
        requirement = Requirement(pin.strip())
        pins.setdefault(canonicalize_name(requirement.name), []).append((requirement, len(hashes)))
    return pins


def version(requirement: Requirement) -> Version:
    """Return the version of a pin. Fails for any other requirement."""
    [only] = requirement.specifier
    assert only.operator == "==", f"{requirement} is not pinned"
    return Version(only.version)
