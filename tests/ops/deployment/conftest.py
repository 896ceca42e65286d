"""A rendered repository for each test. The engine is built once per process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.repositories import RenderedRepository, render_repository
from tests.support.triton_server import MODEL
from triton_repo.cpu_executor import engine


@pytest.fixture(scope="session")
def cpu_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return engine.build(
        MODEL,
        tmp_path_factory.mktemp("cpu") / "engine",
        max_batch_size=16,
        max_beam_width=4,
        max_input_len=1024,
        lora_target_modules=engine.LLAMA_LORA_MODULES,
    )


@pytest.fixture
def place(cpu_engine: Path, tmp_path: Path) -> RenderedRepository:
    return render_repository(tmp_path, cpu_engine)
