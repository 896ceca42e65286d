"""What can be wrong with a model repository, in words that a person can act on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "note"]
_ORDER: tuple[Severity, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake.

    `error`: a model does not load, or requests that the configuration promises to serve fail.
    `warning`: some requests fail, wait or mean something else. `note`: worth knowing.
    `field` is a tensor, a template parameter, a folder or a file of `model`, which is "" for
    the whole repository. `problem` says what was found and what will go wrong; `fix` what to do.
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
    """Errors first; within one severity in the order found."""
    return sorted(findings, key=lambda finding: _ORDER.index(finding.severity))


def has_errors(findings: Iterable[Finding]) -> bool:
    return any(finding.severity == "error" for finding in findings)
