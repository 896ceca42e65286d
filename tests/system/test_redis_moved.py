"""`python -m tests.chaos.moved` with one kind of server: what does not depend on times.

`make chaos` has all kinds and failovers, and bounds the times. `tests/lora_store/test_primary` has
each kind of server.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.moved import run, table
from tests.support.moved_redis import binaries


@pytest.mark.slow
@pytest.mark.parametrize("failover", ["one address", "sentinels"])
def test_nothing_is_lost_when_redis_moves(
    failover: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = run(tmp_path, [next(iter(binaries()))], [failover])
    with capsys.disabled():
        print(table(cases))
    assert [sentence for case in cases for sentence in case.wrong()] == []
