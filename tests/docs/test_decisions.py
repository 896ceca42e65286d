"""Links between code and decisions: each decision is named by the code that it explains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import generate

DECISIONS = sorted(generate.DECISIONS.glob("[0-9]*.md"))
_FOLDERS = (
    "adapters",
    "bench",
    "certificates",
    "gateway",
    "guides",
    "lora_store",
    "ops",
    "triton_repo",
)
_MENTION = re.compile(r"See decisions? ([\d, and]+)\s+in docs/decisions\.")


def mentions(path: Path) -> set[str]:
    """Return the numbers of the decisions that a module names."""
    found = _MENTION.findall(path.read_text(encoding="utf-8"))
    return {number for numbers in found for number in re.findall(r"\d+", numbers)}


@pytest.mark.parametrize("path", DECISIONS, ids=lambda path: path.name[:3])
def test_a_decision_names_its_code_and_is_named_by_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"# {int(path.name[:3])}. ")
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings == ["Context", "Decision", "Consequences"]
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert [link for link in links if not (path.parent / link).exists()] == []
    assert any(link.endswith(".py") for link in links)
    quoted = re.findall(r"`((?:adapters|bench|docs|gateway|ops|tests|triton_repo)/[\w./-]+)`", text)
    assert [name for name in quoted if not (generate.ROOT / name).exists()] == []


def test_numbers_are_used_once_and_exist() -> None:
    numbers = [path.name[:3] for path in DECISIONS]
    assert len(set(numbers)) == len(numbers)
    explained: dict[Path, set[str]] = {}
    for path in DECISIONS:
        for link in re.findall(r"\]\(([^)#]+\.py)\)", path.read_text(encoding="utf-8")):
            explained.setdefault((path.parent / link).resolve(), set()).add(path.name[:3])
    for module in (path for folder in _FOLDERS for path in (generate.ROOT / folder).rglob("*.py")):
        assert mentions(module) == explained.get(module.resolve(), set()), module
