"""`python -m tests.chaos`, run until each of its faults has happened once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import run

SEED = 6
CLIENTS = 16


@pytest.mark.slow
async def test_nothing_is_lost_when_things_break(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await run(tmp_path, 0, SEED, clients=CLIENTS)
    with capsys.disabled():
        print(found.text())
    assert found.broken == []
