"""An executor of the golden model for each test file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.executor_client import start_golden
from triton_repo.cpu_executor import bindings as trtllm


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trtllm.Executor]:
    with start_golden(tmp_path_factory.mktemp("executor"), max_batch_size=16) as executor:
        yield executor
