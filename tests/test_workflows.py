"""GitHub workflows and pre-commit hooks call only existing make targets and tools."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_run_targets_of_the_makefile(path: Path) -> None:
    called: list[str] = []
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        for step in job["steps"]:
            for target in re.findall(r"\bmake (\$\{\{.*?\}\}|\S+)", step.get("run", "")):
                called += job["strategy"]["matrix"]["target"] if "matrix" in target else [target]
    assert called
    assert set(called) <= TARGETS


def test_hooks_run_what_setup_installs() -> None:
    configuration: dict[str, Any] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    installed = (ROOT / "requirements" / "dev.txt").read_text()
    for repository in configuration["repos"]:
        assert repository["repo"] == "local", "a hook of another repository has its own versions"
        for hook in repository["hooks"]:
            program = Path(hook["entry"].split()[0]).name
            assert program == "python" or re.search(rf"^{program}==", installed, re.MULTILINE)
