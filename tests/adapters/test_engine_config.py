"""Engines' config.json in both formats, complete and damaged."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.config_json import ConfigError
from adapters.engine_config import EngineConfig, read_engine_config

V017: dict[str, Any] = {
    "version": "0.17.0",
    "pretrained_config": {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "logits_dtype": "float32",
        "vocab_size": 128256,
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_size": 128,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "moe": {"num_experts": 0},
        "mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None},
    },
    "build_config": {
        "max_batch_size": 8,
        "max_input_len": 1024,
        "max_seq_len": 2048,
        "max_num_tokens": 8192,
        "max_beam_width": 2,
        "max_prompt_embedding_table_size": 0,
        "max_draft_len": 0,
        "gather_context_logits": False,
        "gather_generation_logits": True,
        "kv_cache_type": "PAGED",
        "lora_config": {"lora_target_modules": ["attn_q", "attn_k", "attn_v"], "max_lora_rank": 8},
        "plugin_config": {
            "tokens_per_block": 64,
            "use_paged_context_fmha": True,
            "lora_plugin": "auto",
            "dora_plugin": False,
        },
    },
}
V05: dict[str, Any] = {
    "builder_config": {
        "name": "llama",
        "precision": "float16",
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "num_heads": 32,
        "num_kv_heads": 32,
        "hidden_size": 4096,
        "vocab_size": 32000,
        "num_layers": 32,
        "max_batch_size": 4,
        "max_input_len": 1000,
        "max_output_len": 500,
        "max_num_tokens": None,
        "max_beam_width": 1,
        "max_position_embeddings": 2048,
        "gather_all_token_logits": False,
        "lora_target_modules": None,
    },
    "plugin_config": {
        "paged_kv_cache": True,
        "tokens_per_block": 64,
        "lora_plugin": False,
        "use_paged_context_fmha": False,
    },
}


def read(folder: Path, config: object) -> EngineConfig:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return read_engine_config(folder)


def test_the_form_since_v08(tmp_path: Path) -> None:
    assert read(tmp_path, V017) == EngineConfig(
        version="0.17.0",
        architecture="LlamaForCausalLM",
        dtype="bfloat16",
        logits_dtype="float32",
        quant_algo="FP8",
        vocab_size=128256,
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_size=128,
        intermediate_size=14336,
        num_experts=0,
        max_position_embeddings=131072,
        world_size=4,
        tp_size=2,
        pp_size=2,
        max_batch_size=8,
        max_input_len=1024,
        max_seq_len=2048,
        max_num_tokens=8192,
        max_beam_width=2,
        max_prompt_embedding_table_size=0,
        max_draft_len=0,
        gather_context_logits=False,
        gather_generation_logits=True,
        paged_kv_cache=True,
        tokens_per_block=64,
        use_paged_context_fmha=True,
        lora_plugin="auto",
        dora_plugin=False,
        lora_target_modules=("attn_q", "attn_k", "attn_v"),
        max_lora_rank=8,
    )


def test_the_form_before_v08(tmp_path: Path) -> None:
    assert read(tmp_path, V05) == EngineConfig(
        architecture="llama",
        dtype="float16",
        vocab_size=32000,
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=2048,
        world_size=4,
        tp_size=2,
        pp_size=2,
        max_batch_size=4,
        max_input_len=1000,
        max_seq_len=1500,
        max_beam_width=1,
        gather_context_logits=False,
        gather_generation_logits=False,
        paged_kv_cache=True,
        tokens_per_block=64,
        use_paged_context_fmha=False,
    )


def test_nothing_is_known_of_what_is_missing(tmp_path: Path) -> None:
    assert read(tmp_path, {"pretrained_config": {}}) == EngineConfig()
    assert read(tmp_path, {"builder_config": {}}) == EngineConfig()
    assert EngineConfig().can_reuse_kv_cache is None


@pytest.mark.parametrize(
    ("build", "paged"),
    [
        ({"kv_cache_type": "paged"}, True),
        ({"kv_cache_type": "KVCacheType.PAGED"}, True),
        ({"kv_cache_type": "CONTINUOUS"}, False),
        ({"kv_cache_type": "DISABLED"}, False),
        ({"plugin_config": {"paged_kv_cache": "enable"}}, True),
        ({"plugin_config": {"paged_kv_cache": False}}, False),
        ({}, None),
    ],
)
def test_a_paged_kv_cache_is_said_in_several_ways(
    tmp_path: Path, build: dict[str, Any], paged: bool | None
) -> None:
    config = read(tmp_path, {"pretrained_config": {}, "build_config": build})
    assert config.paged_kv_cache is paged


@pytest.mark.parametrize(
    ("plugin", "dtype"),
    [
        (None, None),
        (False, None),
        ("disable", None),
        ("auto", "bfloat16"),
        (True, "bfloat16"),
        ("float16", "float16"),
    ],
)
def test_the_type_of_adapters(tmp_path: Path, plugin: object, dtype: str | None) -> None:
    config = read(
        tmp_path,
        {
            "pretrained_config": {"dtype": "bfloat16"},
            "build_config": {"plugin_config": {"lora_plugin": plugin}},
        },
    )
    assert config.lora_dtype == dtype


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ("{", "found no JSON ("),
        ([], "found list; allowed: a JSON object"),
        ({}, "found the keys none; allowed: what trtllm-build writes"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            "is that of a Hugging Face model, not an engine",
        ),
        ({"pretrained_config": 3}, "pretrained_config: found 3; allowed: an object"),
        (
            {"pretrained_config": {}, "build_config": {"max_batch_size": "8"}},
            'build_config.max_batch_size: found "8"; allowed: an integer of at least 0',
        ),
        (
            {"pretrained_config": {}, "build_config": {"max_beam_width": True}},
            "build_config.max_beam_width: found true; allowed: an integer of at least 0",
        ),
        (
            {"builder_config": {"lora_target_modules": [1]}},
            "builder_config.lora_target_modules: found [1]; allowed: a list of names",
        ),
        (
            {"pretrained_config": {}, "build_config": {"plugin_config": {"paged_kv_cache": 1}}},
            "build_config.plugin_config.paged_kv_cache: found 1; allowed: true or false",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, config: object, problem: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, config)
    assert str(raised.value).startswith(f"{tmp_path / 'config.json'}: {problem}")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: is not there, so .* is not the folder"):
        read_engine_config(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
PATHS = [
    ("pretrained_config",),
    ("build_config",),
    *[("pretrained_config", name) for name in V017["pretrained_config"]],
    *[("build_config", name) for name in V017["build_config"]],
    *[("build_config", "plugin_config", name) for name in V017["build_config"]["plugin_config"]],
]


@given(st.sampled_from(PATHS), JSON)
def test_any_value_is_read_or_named(path: tuple[str, ...], value: object) -> None:
    config = json.loads(json.dumps(V017))
    part = config
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    problem = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            read(Path(folder), config)
        except ConfigError as error:
            problem = str(error)
    assert problem is None or ".".join(path) in problem
