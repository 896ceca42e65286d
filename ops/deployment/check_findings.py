"""Findings about a model repository: the problem, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
_ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """A single problem.

    `error`: a model does not load, or requests fail that the configuration promises to serve.
    `warning`: some requests fail, wait or mean something else. `note`: worth knowing. `field` is a
    tensor, a template parameter, a folder or a file of `model`, which is "" for the repository
    itself. `problem` has the value found and its consequence; `fix` the remedy.
    """

    severity: Severity
    model: str
    field: str
    problem: str
    fix: str

    def __str__(self) -> str:
        place = f"{self.model}: {self.field}" if self.model else self.field
        return f"{self.severity}: {place}: {self.problem}. Fix: {self.fix}."

    def json(self) -> dict[str, Any]:
        return asdict(self)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Sort errors first, preserving the order within one severity."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)
