"""Base models read from an engine's config.json: modules, sizes and refused values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters import base_model_json, errors
from adapters.base_model import read_base_model
from adapters.modules import GPT, LLAMA, MIXTRAL, PHI3, family, module_sizes
from adapters.sizes import CacheSettings, cache_fit

ENGINE: dict[str, Any] = {
    "version": "0.17.0",
    "pretrained_config": {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_size": 128,
        "intermediate_size": 14336,
        "mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2},
    },
    "build_config": {
        "plugin_config": {"lora_plugin": "auto"},
        "lora_config": {"lora_target_modules": ["attn_q", "attn_k", "attn_v"], "max_lora_rank": 16},
    },
}


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _changed(path: str, value: object) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(ENGINE))
    *sections, name = path.split(".")
    place = config
    for section in sections:
        place = place.setdefault(section, {})
    place[name] = value
    return config


def test_engine_folder(tmp_path: Path) -> None:
    base = read_base_model(_write(tmp_path / "engine-8b", ENGINE), ("demo",))
    assert base.names == ("demo", "engine-8b")
    assert base.dtype == "bfloat16"
    assert (base.tp_size, base.pp_size) == (2, 2)
    assert (base.max_lora_rank, base.lora_target_modules) == (16, ("attn_q", "attn_k", "attn_v"))
    assert family(base) is LLAMA
    assert module_sizes("attn_qkv", base) == (4096, 6144)
    assert module_sizes("mlp_gate_up", base) == (4096, 28672)
    assert module_sizes("mlp_4h_to_h", base) == (14336, 4096)


def test_modules_of_a_later_release_are_taken_beside_known_ones(tmp_path: Path) -> None:
    modules = ["attn_q", "moe_latent_fc1"]
    config = _changed("build_config.lora_config.lora_target_modules", modules)
    base = read_base_model(_write(tmp_path, config), ("demo",))
    assert base.lora_target_modules == ("attn_q", "moe_latent_fc1")
    assert base_model_json.parse(base_model_json.dump(base)) == base
    # TensorRT-LLM's cache has pages for all modules, but the size of this module is unknown.
    with pytest.raises(errors.UnsupportedEngine, match="moe_latent_fc1"):
        cache_fit(base, (), CacheSettings())


def test_left_out_sizes_have_tensorrt_llm_s_defaults(tmp_path: Path) -> None:
    config = _changed("pretrained_config.architecture", "GPTForCausalLM")
    for name in ("num_key_value_heads", "head_size", "intermediate_size", "mapping"):
        config["pretrained_config"][name] = None
    del config["build_config"]["lora_config"]["max_lora_rank"]
    base = read_base_model(_write(tmp_path, config), ())
    assert (base.num_key_value_heads, base.head_size, base.intermediate_size) == (32, 128, 16384)
    assert (base.tp_size, base.pp_size, base.max_lora_rank) == (1, 1, 64)
    assert family(base) is GPT


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("build_config.plugin_config.lora_plugin", None, "build_config.plugin_config.lora_plugin"),
        ("build_config.plugin_config.lora_plugin", False, "lora_plugin"),
        ("build_config.plugin_config", 3, "build_config.plugin_config"),
        ("build_config.lora_config.lora_target_modules", [], "lora_target_modules"),
        ("build_config.lora_config.lora_target_modules", ["attn_x"], "lora_target_modules"),
        ("build_config.lora_config.max_lora_rank", 0, "max_lora_rank"),
        ("pretrained_config.dtype", "float32", "pretrained_config.dtype"),
        ("pretrained_config.dtype", None, "pretrained_config.dtype"),
        ("pretrained_config.hidden_size", "4096", "pretrained_config.hidden_size"),
        ("pretrained_config.num_hidden_layers", None, "pretrained_config.num_hidden_layers"),
        ("pretrained_config.architecture", None, "pretrained_config.architecture"),
    ],
)
def test_refused(tmp_path: Path, path: str, value: object, field: str) -> None:
    with pytest.raises(errors.UnsupportedEngine) as caught:
        read_base_model(_write(tmp_path, _changed(path, value)), ())
    assert caught.value.field.endswith(field)
    assert caught.value.file == str(tmp_path / "config.json")


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    _write(tmp_path, ENGINE)
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_base_model(tmp_path, ()).hidden_size == 4096


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"builder_config": {}}'])
def test_not_an_engine(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(errors.UnsupportedEngine):
        read_base_model(tmp_path, ())


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(errors.MissingFile):
        read_base_model(tmp_path / "nowhere", ())


def test_hugging_face_folder_with_overrides(tmp_path: Path) -> None:
    config = {
        "architectures": ["MixtralForCausalLM"],
        "_name_or_path": "mistralai/Mixtral-8x7B-v0.1",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "num_local_experts": 8,
    }
    base = read_base_model(
        _write(tmp_path / "hf", config),
        ("demo",),
        dtype="bfloat16",
        lora_target_modules=("moe_router",),
        max_lora_rank=4,
    )
    assert base.is_called("/data/Mixtral-8x7B-v0.1")
    assert family(base) is MIXTRAL
    assert (base.dtype, base.lora_target_modules, base.max_lora_rank) == (
        "bfloat16",
        ("moe_router",),
        4,
    )
    assert module_sizes("moe_h_to_4h", base) == (8 * 4096, 8 * 14336)
    assert module_sizes("moe_router", base) == (4096, 8)


@pytest.mark.parametrize(
    ("architecture", "experts", "expected"),
    [
        ("LlamaForCausalLM", None, LLAMA),
        ("LlamaForCausalLM", {"num_experts": 8}, MIXTRAL),
        ("Phi3ForCausalLM", None, PHI3),
        ("Gemma2ForCausalLM", None, LLAMA),
    ],
)
def test_families(
    tmp_path: Path, architecture: str, experts: dict[str, int] | None, expected: object
) -> None:
    config = _changed("pretrained_config.architecture", architecture)
    config["pretrained_config"]["moe"] = experts
    assert family(read_base_model(_write(tmp_path, config), ())) is expected


@pytest.mark.parametrize(("qwen_type", "known"), [("qwen2", True), ("qwen", False)])
def test_qwen_generations_share_a_class(tmp_path: Path, qwen_type: str, known: bool) -> None:
    config = _changed("pretrained_config.architecture", "QWenForCausalLM")
    config["pretrained_config"]["qwen_type"] = qwen_type
    base = read_base_model(_write(tmp_path, config), ())
    if known:
        assert family(base) is LLAMA
        return
    with pytest.raises(errors.UnsupportedEngine, match="QWenForCausalLM:qwen"):
        family(base)
