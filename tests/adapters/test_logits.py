"""Logits of base model plus converted adapter in the CPU executor, compared with PEFT's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from adapters import peft
from adapters.adapter import Converted, Dtype
from adapters.base_model import BaseModel, read_base_model
from adapters.convert import convert
from tests.support.executor_client import request, run, start
from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor.engine import LLAMA_LORA_MODULES, build

DATA = Path(__file__).parents[1] / "data" / "lora"
CASES = sorted(path.parent.name for path in DATA.glob("llama-*/expected.safetensors"))


def _engine(folder: Path, dtype: Dtype) -> tuple[BaseModel, trtllm.Executor]:
    engine = build(
        DATA / "base-llama",
        folder,
        dtype=dtype,
        gather_context_logits=True,
        lora_target_modules=LLAMA_LORA_MODULES,
        max_lora_rank=16,
    )
    return read_base_model(engine, ("base-llama",)), start(engine)


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[BaseModel, trtllm.Executor]]:
    base, executor = _engine(tmp_path_factory.mktemp("engine"), request.param)
    with executor:
        yield base, executor


def _lora(converted: Converted) -> trtllm.LoraConfig:
    storage = "<f2" if converted.dtype == "float16" else "<u2"
    weights = np.frombuffer(converted.weights, storage).reshape(converted.rows, converted.width)
    config = np.frombuffer(converted.config, "<i4").reshape(converted.rows, 3)
    return trtllm.LoraConfig(converted.task_id, weights, config)


def _logits(
    executor: trtllm.Executor, ids: list[int], lora: trtllm.LoraConfig | None
) -> np.ndarray:
    (answer,) = run(executor, request(ids, 1, lora_config=lora, return_context_logits=True))
    assert answer.error is None
    return np.asarray(answer.last.context_logits, np.float32)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_the_merged_model(
    engine: tuple[BaseModel, trtllm.Executor], name: str
) -> None:
    base, executor = engine
    expected = load_file(DATA / name / "expected.safetensors")
    ids = expected["input_ids"][0].tolist()
    converted = convert(peft.read(DATA / name), base)
    with_adapter = _logits(executor, ids, _lora(converted))
    without = _logits(executor, ids, None)
    # Both dtypes represent the adapters' values exactly (see make_lora_golden.py).
    np.testing.assert_allclose(with_adapter, expected["logits"], atol=1e-3)
    assert np.abs(without - expected["logits"]).max() > 0.3
