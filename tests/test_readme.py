"""README.md says what the code does."""

from __future__ import annotations

from gateway.app import ROUTES
from tests import readme

TEXT = readme.README.read_text(encoding="utf-8")


def test_the_generated_sections_are_current() -> None:
    assert readme.updated(TEXT) == TEXT, "run `python -m tests.readme`"


def test_every_route_is_described() -> None:
    for _, path, _ in ROUTES:
        short = path.replace(":path", "")
        # The actions on an adapter are listed by their last part.
        assert short in TEXT or "/" + short.rsplit("/", 1)[-1] + "`" in TEXT, path
