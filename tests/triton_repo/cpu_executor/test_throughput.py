"""The measurement of the executor's throughput."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.executor_client import GOLDEN, start
from triton_repo.cpu_executor.synthetic import build
from triton_repo.cpu_executor.throughput import main, measure


def test_the_figures_are_those_of_an_engine_whose_pace_is_known(tmp_path: Path) -> None:
    """Check the results for an engine with a known pace, which they cannot exceed."""
    build(tmp_path, vocab_size=100, tokens_per_second=200.0, first_token_ms=100.0)
    with start(tmp_path) as executor:
        cpu = time.process_time()
        found = measure(executor, 4, vocab_size=100, max_tokens=41)
        spent = time.process_time() - cpu
    assert found.concurrency == 4
    assert found.first_response_ms >= 100
    assert found.tokens_per_second <= 4 * 41 / 0.3
    assert found.tokens_per_cpu_second >= 4 * 41 / spent


def test_a_row_per_concurrency(capsys: pytest.CaptureFixture[str]) -> None:
    main([str(GOLDEN / "gqa"), "--concurrency", "1", "3", "--top-p", "0.9"])
    header, *rows = capsys.readouterr().out.splitlines()
    assert "tokens/s" in header
    assert [int(row.split()[0]) for row in rows] == [1, 3]
    assert all(float(value) > 0 for row in rows for value in row.split())
