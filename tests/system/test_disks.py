"""`python -m tests.disks` with few adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.disks.run import run


@pytest.mark.slow
async def test_no_request_is_lost_or_wrong_on_tritons_with_disks_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await run(tmp_path, 4, 6, clients=3)
    with capsys.disabled():
        print(found.text())
    assert not found.broken
