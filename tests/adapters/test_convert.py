"""Conversion of adapters: rows equal PEFT's result in the engine's layout and dtype."""

from __future__ import annotations

import hashlib
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from adapters import peft
from adapters.adapter import MODULE_IDS, Converted, make_converted
from adapters.base_model import BaseModel, read_base_model
from adapters.convert import convert
from tests.support.lora_files import (
    BASE,
    SIZES,
    Array,
    from_bits,
    key,
    pair,
    to_bfloat16,
    unpack,
    write_peft,
)

DATA = Path(__file__).parents[1] / "data" / "lora"
CASES = sorted(path.parent.name for path in DATA.glob("*/expected.safetensors"))
ATTENTION = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_dense",
}
SEPARATE = {
    **ATTENTION,
    "mlp.gate_proj": "mlp_h_to_4h",
    "mlp.up_proj": "mlp_gate",
    "mlp.down_proj": "mlp_4h_to_h",
}
FUSED = {
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_dense",
    "mlp.gate_up_proj": "mlp_gate_up",
    "mlp.down_proj": "mlp_4h_to_h",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_dense",
    "mlp.c_fc": "mlp_h_to_4h",
    "mlp.c_proj": "mlp_4h_to_h",
}


def _delta(rows: dict[tuple[str, int], tuple[Array, Array]], module: str, layer: int) -> Array:
    a, b = rows[module, layer]
    return b @ a


def _case(name: str, **overrides: object) -> tuple[BaseModel, Converted]:
    base = read_base_model(DATA / f"base-{name.partition('-')[0]}", ())
    base = replace(base, **overrides)  # type: ignore[arg-type]
    return base, convert(peft.read(DATA / name), base)


@pytest.mark.parametrize("name", CASES)
def test_rows_equal_peft_delta_weights(name: str) -> None:
    """Check alpha / r, rsLoRA, rank and alpha patterns, fused layers and Conv1D against PEFT."""
    base, converted = _case(name)
    rows = unpack(converted, base)
    expected = load_file(DATA / name / "expected.safetensors")
    deltas = {key: value for key, value in expected.items() if key.startswith("delta.")}
    names = FUSED if name.startswith(("phi3", "gpt2")) else SEPARATE
    for key_, delta in deltas.items():
        parts = key_.split(".")
        layer = next(int(part) for part in parts if part.isdigit())
        module = names[".".join(parts[-2:])]
        found = _delta(rows, module, layer)
        if module == "mlp_gate_up":
            up, gate = np.split(found, 2)
            found = np.concatenate([gate, up])
        np.testing.assert_allclose(found, delta.astype(np.float32), atol=2e-3, rtol=5e-3)
    zero = [place for place, (a, b) in rows.items() if not a.any() and not b.any()]
    assert len(rows) == len(deltas) + len(zero)
    assert {module for module, _ in zero} <= {"attn_q", "attn_k", "attn_v"}


def test_missing_k_becomes_a_zero_row_of_the_same_rank() -> None:
    base, converted = _case("llama-qv-r4")
    rows = unpack(converted, base)
    assert list(converted.config_rows()) == [
        (module, layer, 4) for layer in (0, 1) for module in (1, 2, 3)
    ]
    a, b = rows["attn_k", 0]
    assert a.shape == (4, 32)
    assert b.shape == (16, 4)
    assert not a.any()
    assert not b.any()


def test_no_zero_row_when_none_of_qkv_is_there() -> None:
    _, converted = _case("llama-one-layer-o-r1")
    assert list(converted.config_rows()) == [(MODULE_IDS["attn_dense"], 1, 1)]


@pytest.mark.parametrize(
    ("fused", "parts"),
    [
        ("attn_qkv", ("attn_q", "attn_k", "attn_v")),
        ("mlp_gate_up", ("mlp_h_to_4h", "mlp_gate")),
    ],
)
def test_fused_layer_is_split_for_an_engine_without_the_fused_module(
    fused: str, parts: tuple[str, ...]
) -> None:
    base, whole = _case("phi3-all-r4")
    modules = tuple(name for name in MODULE_IDS if name != fused)
    split_base, split = _case("phi3-all-r4", lora_target_modules=modules)
    together = _delta(unpack(whole, base), fused, 0)
    order = parts if fused == "attn_qkv" else tuple(reversed(parts))
    rows = unpack(split, split_base)
    apart = np.concatenate([_delta(rows, part, 0) for part in order])
    np.testing.assert_array_equal(together, apart)


@pytest.mark.parametrize("fused", ["attn_qkv", "mlp_gate_up"])
def test_tensor_parallel_share_of_a_fused_row_is_each_part_s_share(fused: str) -> None:
    """Check fused rows with tensor parallelism.

    Rank i gets the i-th contiguous slice of B, which must have the rank's slices of q, k and v.
    """
    base, whole = _case("phi3-all-r4")
    _, shared = _case("phi3-all-r4", tp_size=2)
    b = unpack(whole, base)[fused, 0][1]
    kv = base.num_key_value_heads * base.head_size
    sizes = [base.hidden_size, kv, kv] if fused == "attn_qkv" else [base.intermediate_size] * 2
    parts = np.split(b, np.cumsum(sizes)[:-1])
    expected = np.concatenate([np.split(part, 2)[rank] for rank in (0, 1) for part in parts])
    np.testing.assert_array_equal(unpack(shared, base)[fused, 0][1], expected)


def _mixtral() -> BaseModel:
    modules = ("moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router")
    return replace(
        BASE,
        architecture="MixtralForCausalLM",
        num_experts=3,
        lora_target_modules=modules,
    )


def test_experts_of_a_layer_share_a_row_and_absent_ones_are_zero(tmp_path: Path) -> None:
    """Check the layout [experts, rank, in], then [experts, out, rank]. Expert 1 has no adapter."""
    base = _mixtral()
    layer = "model.layers.1.block_sparse_moe"
    tensors = pair(f"{layer}.experts.0.w1", 4, (8, 12)) | pair(f"{layer}.experts.2.w1", 4, (8, 12))
    tensors |= pair(f"{layer}.gate", 4, (8, 3))
    converted = convert(peft.read(write_peft(tmp_path, tensors)), base)
    assert list(converted.config_rows()) == [(13, 1, 4), (16, 1, 4)]
    raw = np.frombuffer(converted.weights, "<f2").reshape(2, -1).astype(np.float32)
    a = raw[0, : 3 * 4 * 8].reshape(3, 4, 8)
    b = raw[0, 3 * 4 * 8 : 3 * 4 * 20].reshape(3, 12, 4)
    for expert in (0, 2):
        module = f"{layer}.experts.{expert}.w1"
        np.testing.assert_allclose(a[expert], tensors[key(module, "A")], rtol=1e-3)
        np.testing.assert_allclose(b[expert], tensors[key(module, "B")] * 2, rtol=1e-3)
    assert not a[1].any()
    assert not b[1].any()


@st.composite
def _adapters(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Array]]:
    """Generate configuration and tensors of an adapter for `BASE`."""
    rank = draw(st.integers(1, 8))
    names = draw(st.sets(st.sampled_from(sorted(SIZES)), min_size=1))
    layers = draw(st.sets(st.integers(0, 1), min_size=1))
    dtype = draw(st.sampled_from([np.float32, np.float16]))
    seed = draw(st.integers(0, 2**16))
    tensors: dict[str, Array] = {}
    for layer in sorted(layers):
        for name in sorted(names):
            module = f"model.layers.{layer}.self_attn.{name}"
            tensors |= pair(module, rank, SIZES[name], dtype, seed)
    return {"r": rank, "lora_alpha": draw(st.floats(-64, 64, width=16))}, tensors


@given(adapter=_adapters(), dtype=st.sampled_from(["float16", "bfloat16"]))
def test_any_adapter_comes_back_scaled_and_rounded_once(
    tmp_path_factory: pytest.TempPathFactory,
    adapter: tuple[dict[str, Any], dict[str, Array]],
    dtype: str,
) -> None:
    base = replace(BASE, dtype=dtype)  # type: ignore[arg-type]
    config, tensors = adapter
    folder = write_peft(tmp_path_factory.mktemp("a"), tensors, **config)
    converted = convert(peft.read(folder), base)
    rows = unpack(converted, base)
    scale = np.float32(config["lora_alpha"] / config["r"])
    for name in (name for name in tensors if "lora_A" in name):
        parts = name.split(".")
        a, b = rows[ATTENTION[".".join(parts[5:7])], int(parts[4])]
        scaled = tensors[name.replace("lora_A", "lora_B")].astype(np.float32) * scale
        np.testing.assert_array_equal(a, _nearest(tensors[name], dtype))
        np.testing.assert_array_equal(b, _nearest(scaled, dtype))
    assert convert(peft.read(folder), base).digest == converted.digest


def _nearest(values: Array, dtype: str) -> Array:
    """Return the nearest numbers of the dtype, ties to even, computed exactly in float64."""
    wide = values.astype(np.float64)
    if dtype == "float16":
        return wide.astype(np.float16).astype(np.float32)
    low = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint32)
    below, above = from_bits(low, "bfloat16"), from_bits(low + 1, "bfloat16")
    down, up = np.abs(wide - below), np.abs(above.astype(np.float64) - wide)
    return np.where((down < up) | ((down == up) & (low % 2 == 0)), below, above)


def test_bfloat16_source_is_taken_over_bit_by_bit(tmp_path: Path) -> None:
    torch_like = pair("model.layers.0.self_attn.o_proj", 2, (8, 8))
    bits = {name: (v.view(np.uint32) >> 16).astype("<u2") for name, v in torch_like.items()}
    folder = write_peft(tmp_path, bits, r=2, lora_alpha=2)
    to_bfloat16(folder / "adapter_model.safetensors")
    base = replace(BASE, dtype="bfloat16")
    converted = convert(peft.read(folder), base)
    flat = np.concatenate([value.reshape(-1) for value in bits.values()])
    np.testing.assert_array_equal(np.frombuffer(converted.weights, "<u2"), flat)


def test_the_digest_depends_on_content_and_data_type_only(tmp_path: Path) -> None:
    tensors = pair("model.layers.0.self_attn.o_proj", 2, (8, 8))
    first = convert(peft.read(write_peft(tmp_path / "a", tensors, r=2)), BASE)
    reordered = dict(reversed(tensors.items()))
    again = convert(peft.read(write_peft(tmp_path / "b", reordered, r=2, revision="main")), BASE)
    other_dtype = convert(peft.read(tmp_path / "a"), replace(BASE, dtype="bfloat16"))
    tensors[key("model.layers.0.self_attn.o_proj", "B")][0, 0] += 1
    changed = convert(peft.read(write_peft(tmp_path / "c", tensors, r=2)), BASE)
    assert first.digest == again.digest
    assert len({first.digest, other_dtype.digest, changed.digest}) == 3
    assert len({first.task_id, other_dtype.task_id, changed.task_id}) == 3
    assert 1 <= first.task_id < 2**63


def test_the_digest_is_the_documented_one() -> None:
    weights = bytes(range(16))
    converted = make_converted("bfloat16", [(1, 0, 2)], 8, weights)
    config = np.array([1, 0, 2], "<i4").tobytes()
    expected = hashlib.sha256(b"lora bfloat16 1 8\n" + config + weights).hexdigest()
    assert converted.digest == expected
    assert converted.config == config
    assert converted.task_id == int(expected, 16) >> 193


def test_one_buffer_and_one_tensor_at_a_time_are_in_memory(tmp_path: Path) -> None:
    base = replace(
        BASE,
        num_hidden_layers=8,
        hidden_size=512,
        head_size=256,
        intermediate_size=1024,
        max_lora_rank=64,
    )
    tensors: dict[str, Array] = {}
    for layer in range(8):
        tensors |= pair(f"model.layers.{layer}.mlp.up_proj", 64, (512, 1024))
    adapter = peft.read(write_peft(tmp_path, tensors, r=64))
    largest = 64 * 1024 * 4
    tracemalloc.start()
    converted = convert(adapter, base)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert converted.nbytes == 8 * 64 * 1536 * 2
    assert peak < converted.nbytes + 6 * largest
