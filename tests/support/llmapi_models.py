"""Models of the llmapi repository for a test's Triton, with the behaviour of each release."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tests.support.triton_server import MODEL, Arrays
from triton_repo.cpu_executor import synthetic
from triton_repo.llmapi_repository import MAIN, V1_2, V1_3, render_llmapi

RELEASES = {"like_main": MAIN, "like_1_3": V1_3, "like_1_2": V1_2}
"""Models on the synthetic engine, which processes requests one after the other."""
ENDLESS = 1_000_000


def render_releases(repository: Path, engine: Path) -> None:
    """Render the models of `RELEASES`, on an engine built in the folder `engine`."""
    build_synthetic(engine)
    for name, behaves_as in RELEASES.items():
        render_llmapi(repository, {"model": str(engine), "behaves_as": behaves_as}, model=name)


def build_synthetic(
    folder: Path, *, tokens_per_second: float = 50.0, max_batch_size: int = 1
) -> Path:
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    synthetic.build(
        folder,
        vocab_size=4096,
        tokens=tokenizer.encode(" one").ids,
        tokens_per_second=tokens_per_second,
        first_token_ms=0,
        max_batch_size=max_batch_size,
        max_seq_len=ENDLESS + 100,
    )
    shutil.copyfile(MODEL / "tokenizer.json", folder / "tokenizer.json")
    return folder


def build_inputs(text: Any, **more: Any) -> Arrays:
    """Return inputs as tensors of one element. Arrays stay unchanged."""
    return {name: _tensor(name, value) for name, value in {"text_input": text, **more}.items()}


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str | bytes):
        return np.array([value.encode() if isinstance(value, str) else value], np.object_)
    if isinstance(value, bool):
        return np.array([value])
    if isinstance(value, float):
        return np.array([value], np.float32)
    return np.array([value], np.uint64 if name in ("lora_id", "sampling_param_seed") else np.int32)
