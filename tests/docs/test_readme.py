"""README.md and the guides agree with the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs import generate
from gateway.app import ROUTES
from gateway.config.settings import Settings

TEXT = "".join(path.read_text(encoding="utf-8") for path in generate.FILES)


@pytest.mark.parametrize("path", generate.FILES, ids=generate.name)
def test_the_generated_sections_are_current(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert generate.update_sections(text) == text, "run `python -m docs.generate`"


def test_the_prometheus_rule_is_current() -> None:
    written = generate.PROMETHEUS_RULE.read_text(encoding="utf-8")
    assert written == generate.prometheus_rule(), "run `python -m docs.generate`"


def test_every_generated_section_is_somewhere() -> None:
    assert generate.list_sections(TEXT) == set(generate.sections())


def test_every_setting_is_in_the_reference() -> None:
    reference = (generate.ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = [line.split("`")[1] for line in reference.splitlines() if line.startswith("| `")]
    assert rows == [f"GATEWAY_{name.upper()}" for name in Settings.model_fields]


def test_every_route_is_described() -> None:
    for route in filter(lambda route: route.include_in_schema, ROUTES):
        whole = re.escape(route.path.replace(":path", "")) + r"(?![\w/{-])"
        assert re.search(whole, TEXT), route.path
