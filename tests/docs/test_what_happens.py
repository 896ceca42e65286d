"""docs/what-happens-when.md names existing tests and alerts, with a test in each line."""

from __future__ import annotations

import re

import pytest
import yaml

from docs.generate import ROOT

TEXT = (ROOT / "docs/what-happens-when.md").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.splitlines() if re.match(r"\| [^|]", line) and "shown by" not in line]
_NAMED = r"`([\w/]+)::(test_\w+)`"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:50])
def test_what_a_line_says_is_shown_by_tests(row: str) -> None:
    claim, shown = row.strip("|").rsplit("|", 1)
    assert claim.strip()
    named = re.findall(_NAMED, shown)
    assert named
    assert re.sub(_NAMED, "", shown).strip(", ") == ""
    for file, name in named:
        text = (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), name


def test_alerts_exist() -> None:
    groups = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text("utf-8"))["groups"]
    known = {rule["alert"] for group in groups for rule in group["rules"]}
    assert set(re.findall(r"`((?:[A-Z][a-z]+){2,})`", TEXT)) <= known
    # The page must explain each alert that pages an operator.
    pages = {
        rule["alert"]
        for group in groups
        for rule in group["rules"]
        if rule["labels"]["severity"] == "page"
    }
    assert pages <= set(re.findall(r"`(\w+)`", TEXT))
