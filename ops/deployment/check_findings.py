"""Findings of the checks of a model repository: problems, and how to fix them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
_ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem that a check has found.

    Attributes:
        severity: "error" if a model does not load, or fails requests that its configuration allows;
            "warning" if only some requests fail, are delayed or are misread; "note" for
            information.
        model: the model's name; "" for the repository itself.
        field: a tensor, a template parameter, a folder or a file of the model.
        problem: the value found and its consequence.
        fix: the change that removes the problem.
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
    """Return the findings with errors first; the order within one severity is unchanged."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)
