"""Converted adapters written back as PEFT files, read as TensorRT-LLM reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from adapters import peft
from adapters.adapter import Converted, make_converted
from adapters.base_model import BaseModel, read_base_model
from adapters.convert import convert
from adapters.errors import ShapeMismatch, UnsupportedModule
from adapters.peft_files import peft_files
from tests.support.lora_files import BASE, Array, pair, qv_tensors, write_peft

DATA = Path(__file__).parents[1] / "data" / "lora"
CASES = sorted(path.parent.name for path in DATA.glob("*/expected.safetensors"))


def _case(name: str, **overrides: object) -> tuple[BaseModel, Converted]:
    base = read_base_model(DATA / f"base-{name.partition('-')[0]}", ())
    base = replace(base, dtype="float16", **overrides)  # type: ignore[arg-type]
    return base, convert(peft.read(DATA / name), base)


def _write(folder: Path, converted: Converted, base: BaseModel) -> Path:
    files = peft_files(converted, base)
    (folder / peft.CONFIG).write_bytes(files.config)
    (folder / peft.WEIGHTS).write_bytes(b"".join(files.weights()))
    assert sum(path.stat().st_size for path in folder.iterdir()) == files.nbytes
    return folder


def _deltas(folder: Path) -> dict[str, Array]:
    """Return B A times the scale that `lora_manager.py` uses, by the linear layer's path."""
    config = json.loads((folder / peft.CONFIG).read_text())
    assert not config["use_rslora"]
    tensors = load_file(folder / peft.WEIGHTS)
    deltas = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            b = tensors[name.replace(".lora_A.", ".lora_B.")].astype(np.float32)
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            deltas[path] = config["lora_alpha"] / a.shape[0] * (b @ a.astype(np.float32))
    return deltas


@pytest.mark.parametrize(
    ("name", "overrides"),
    [*[(name, {}) for name in CASES], ("phi3-all-r4", {"tp_size": 2})],
)
def test_what_is_written_is_what_peft_computes(
    tmp_path: Path, name: str, overrides: dict[str, object]
) -> None:
    """Check alpha / r, rsLoRA, patterns, fused layers in each engine's order, and Conv1D."""
    base, converted = _case(name, **overrides)
    found = _deltas(_write(tmp_path, converted, base))
    expected = load_file(DATA / name / "expected.safetensors")
    deltas = {
        key.removeprefix("delta."): value
        for key, value in expected.items()
        if key.startswith("delta.")
    }
    assert found.keys() == deltas.keys()
    for path, delta in deltas.items():
        np.testing.assert_allclose(found[path], delta.astype(np.float32), atol=2e-3, rtol=5e-3)


def test_what_was_laid_out_for_ranks_is_written_for_a_base_that_knows_of_none(
    tmp_path: Path,
) -> None:
    """Check a base model without an engine, which knows no tp_size.

    That is the case once the engines are gone, and only the tokenizer's folder remains.
    """
    base, plain = _case("phi3-all-r4")
    _, split = _case("phi3-all-r4", tp_size=2)
    assert split.digest != plain.digest
    written = [peft_files(converted, base) for converted in (plain, split)]
    assert len({b"".join(files.weights()) for files in written}) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_our_own_reader_gets_the_same_tensors_of_it(tmp_path: Path, dtype: str) -> None:
    base = replace(BASE, dtype=dtype)  # type: ignore[arg-type]
    (tmp_path / "written").mkdir()
    converted = convert(peft.read(write_peft(tmp_path / "source", qv_tensors())), base)
    again = convert(peft.read(_write(tmp_path / "written", converted, base)), base)
    assert again.digest == converted.digest


def test_a_fused_layer_that_was_split_is_put_together(tmp_path: Path) -> None:
    """Check an adapter converted for an engine with separate q, k, v and MLP halves."""
    base, whole = _case("phi3-all-r4")
    fused = ("attn_qkv", "mlp_gate_up")
    apart = tuple(name for name in base.lora_target_modules if name not in fused)
    split_base, split = _case("phi3-all-r4", lora_target_modules=apart)
    (tmp_path / "whole").mkdir()
    (tmp_path / "split").mkdir()
    expected = _deltas(_write(tmp_path / "whole", whole, base))
    found = _deltas(_write(tmp_path / "split", split, split_base))
    assert found.keys() == expected.keys()
    for path, delta in expected.items():
        np.testing.assert_array_equal(found[path], delta)


def test_experts_cannot_be_written_back(tmp_path: Path) -> None:
    base = replace(
        BASE,
        architecture="MixtralForCausalLM",
        num_experts=3,
        lora_target_modules=("moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router"),
    )
    tensors = pair("model.layers.1.block_sparse_moe.experts.0.w1", 4, (8, 12))
    converted = convert(peft.read(write_peft(tmp_path, tensors)), base)
    with pytest.raises(UnsupportedModule, match=r"moe_h_to_4h of layer 1.*written back"):
        peft_files(converted, base)


def test_tensors_of_another_base_model_are_refused(tmp_path: Path) -> None:
    converted = convert(peft.read(write_peft(tmp_path, qv_tensors())), BASE)
    with pytest.raises(ShapeMismatch, match="attn_q of layer 0"):
        peft_files(converted, replace(BASE, hidden_size=6))
    with pytest.raises(ShapeMismatch, match="attn_q of layer 0"):
        peft_files(converted, replace(BASE, hidden_size=16))


def test_modules_that_no_layer_of_this_architecture_is_are_refused() -> None:
    rows = [(0, 0, 2)]  # a Llama has no attn_qkv
    converted = make_converted("float16", rows, 2 * 24, bytes(2 * 2 * 24))
    with pytest.raises(UnsupportedModule, match="attn_qkv of layer 0"):
        peft_files(converted, BASE)
