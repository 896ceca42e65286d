"""The throughput measurement."""

from __future__ import annotations

import pytest

from tests.support.executor_client import GOLDEN
from triton_repo.cpu_executor.throughput import main


def test_a_row_per_concurrency(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(GOLDEN / "gqa"), "--concurrency", "1", "3", "--top-p", "0.9"])
    header, *rows = capsys.readouterr().out.splitlines()
    assert "tokens/s" in header
    assert [int(row.split()[0]) for row in rows] == [1, 3]
    assert all(float(value) > 0 for row in rows for value in row.split())
