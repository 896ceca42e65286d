"""Engine folders: written files, loading, and refused engines."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.executor_client import GOLDEN, golden_greedy, golden_prompt, request, run, start
from triton_repo.cpu_executor import weights
from triton_repo.cpu_executor.engine import build, load_config


def hf_folder(folder: Path, **changes: Any) -> Path:
    """Write a Hugging Face folder whose config.json has ``changes`` (None removes a key)."""
    folder.mkdir()
    config = json.loads((GOLDEN / "gqa" / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_build_writes_an_engine_config(tmp_path: Path) -> None:
    target = build(GOLDEN / "llama3_rope", tmp_path / "e", max_batch_size=3, max_seq_len=100)
    config = json.loads((target / "config.json").read_text())
    assert set(config) == {"version", "pretrained_config", "build_config"}
    model, limits = config["pretrained_config"], config["build_config"]
    assert model["architecture"] == "LlamaForCausalLM"
    assert (model["dtype"], model["logits_dtype"]) == ("float16", "float32")
    assert (model["num_attention_heads"], model["num_key_value_heads"]) == (4, 1)
    assert model["rotary_scaling"]["rope_type"] == "llama3"
    assert (limits["max_batch_size"], limits["max_seq_len"], limits["max_input_len"]) == (
        3,
        100,
        100,
    )
    assert limits["plugin_config"]["lora_plugin"] is None
    read = load_config(target)
    assert (read.max_batch_size, read.max_seq_len, read.rotary_base) == (3, 100, 500000.0)
    assert read.lora_target_modules == ()


def test_a_hugging_face_folder_is_an_engine_too() -> None:
    with start(GOLDEN / "gqa") as executor:
        assert run(executor, request(golden_prompt(), 5))[0].tokens() == golden_greedy()[:5]


def test_an_iteration_takes_as_long_as_the_model_says(tmp_path: Path) -> None:
    model = hf_folder(tmp_path / "hf", least_iteration_ms=50)
    (model / "model.safetensors").symlink_to(GOLDEN / "gqa" / "model.safetensors")
    with start(build(model, tmp_path / "e")) as executor:
        began = time.monotonic()
        assert run(executor, request(golden_prompt(), 5))[0].tokens() == golden_greedy()[:5]
        # The last token is returned before its iteration has ended, so only four iterations count.
        assert time.monotonic() - began >= 4 * 0.05


def test_older_hugging_face_keys(tmp_path: Path) -> None:
    old = hf_folder(
        tmp_path / "hf",
        rope_parameters=None,
        rope_theta=5000.0,
        rope_scaling={"type": "linear", "factor": 2.0},
        head_dim=None,
        num_key_value_heads=None,
    )
    config = load_config(old)
    assert config.rotary_base == 5000.0
    assert config.rotary_scaling == {"type": "linear", "rope_type": "linear", "factor": 2.0}
    assert (config.head_size, config.num_key_value_heads) == (8, 4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, r"architectures: found \['Qwen2ForCausalLM'\]"),
        ({"hidden_act": "gelu"}, "hidden_act: found gelu, allowed silu"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
            "rope_type: found yarn, allowed default, linear, llama3",
        ),
    ],
)
def test_other_models_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        load_config(hf_folder(tmp_path / "hf", **changes))


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"max_seq_len": 513}, "max_seq_len: found 513, allowed at most 512"),
        ({"lora_target_modules": ["attn_qkv"]}, r"lora_target_modules: found \['attn_qkv'\]"),
    ],
)
def test_build_refuses_by_name(tmp_path: Path, limits: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build(GOLDEN / "gqa", tmp_path / "e", **limits)


def test_another_architecture_in_an_engine_is_refused(tmp_path: Path) -> None:
    build(GOLDEN / "gqa", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["pretrained_config"]["architecture"] = "QWenForCausalLM"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="architecture: found QWenForCausalLM"):
        load_config(tmp_path)


def test_shards_are_merged_with_their_bytes(tmp_path: Path) -> None:
    whole = load_file(GOLDEN / "gqa" / "model.safetensors")
    names = sorted(whole)
    source = hf_folder(tmp_path / "hf")
    for part in (0, 1):
        shard = {name: whole[name] for name in names[part::2]}
        save_file(shard, source / f"model-0000{part + 1}-of-00002.safetensors")
    merged = load_file(build(source, tmp_path / "e") / "model.safetensors")
    assert sorted(merged) == names
    assert all(np.array_equal(merged[name], whole[name]) for name in names)


def test_dtypes(tmp_path: Path) -> None:
    values = np.array([1.0, -2.5, 3.14159], np.float32)
    save_file({"a": values, "b": values.astype(np.float16)}, tmp_path / "model.safetensors")
    loaded = weights.load_float32(tmp_path)
    assert np.array_equal(loaded["a"], values)
    assert np.array_equal(loaded["b"], values.astype(np.float16).astype(np.float32))
    save_file({"a": values.astype(np.float64)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: a dtype: found F64; allowed: F32"):
        weights.load_float32(tmp_path)


def test_weights_that_end_too_early(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(8, np.float32)}, path)
    os.truncate(path, path.stat().st_size - 4)
    with pytest.raises(ValueError, match=r"model\.safetensors was cut: it has \d+ of"):
        weights.load_float32(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no model\*\.safetensors; download"):
        weights.load_float32(tmp_path)


def test_bfloat16(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}).encode()
    bits = np.array([0x3F80, 0xC020, 0x0000], "<u2").tobytes()
    written = len(header).to_bytes(8, "little") + header + bits
    (tmp_path / "model.safetensors").write_bytes(written)
    assert weights.load_float32(tmp_path)["a"].tolist() == [1.0, -2.5, 0.0]
