"""`python -m tests.chaos.moved`, for each server that this machine has."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.moved import run, table
from tests.support.moved_redis import FAILOVERS, KINDS, binaries, why_missing


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_move_is_noticed_and_nothing_is_lost(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if kind not in binaries():
        pytest.skip(why_missing(kind))
    cases = run(tmp_path, [kind], list(FAILOVERS))
    with capsys.disabled():
        print(table(cases))
    assert [sentence for case in cases for sentence in case.broken()] == []
