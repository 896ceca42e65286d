"""Everything that is wrong with a model repository, one made elsewhere included."""

from __future__ import annotations

from pathlib import Path

from ops.deployment.check_findings import Finding, by_severity
from ops.deployment.check_repository import read_repository
from ops.deployment.check_serving import Places, serving_findings
from ops.deployment.check_structure import structure_findings


def check(
    path: Path, engine_dir: Path | None = None, tokenizer_dir: Path | None = None
) -> list[Finding]:
    """The findings on the repository in `path`, errors first.

    `engine_dir` and `tokenizer_dir` say where those folders are on this machine, where Triton
    sees them under another path. Raises RepositoryError when `path` holds no models.
    """
    repository = read_repository(path)
    places = Places(engine_dir, tokenizer_dir)
    return by_severity(structure_findings(repository) + serving_findings(repository, places))
