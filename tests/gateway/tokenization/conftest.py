"""A fixture with the demo model's tokenizer, loaded as a gateway loads it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gateway.tokenization.prompts import Prompts
from ops.commands.up import DEMO_MODEL


@pytest.fixture
def prompts() -> Iterator[Prompts]:
    prompts = Prompts.load(DEMO_MODEL)
    yield prompts
    prompts.close()
