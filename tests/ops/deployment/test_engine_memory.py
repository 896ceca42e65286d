"""Memory of engines, compared with published figures of well-known models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.adapter import ModuleRows
from adapters.config_json import ConfigError
from adapters.sizes import CacheSettings, cache_fit
from ops.deployment.checkpoint import Checkpoint, read_checkpoint
from ops.deployment.gpus import GPUS, find_gpu
from ops.deployment.intent import Intent, base_model
from ops.deployment.memory import (
    kv_bytes_per_token,
    lora_cache,
    parameter_count,
    plan_memory,
    weight_bytes,
    workspace_bytes,
)
from tests.support.hf_configs import CONFIGS, write_config

GB = 10**9
INTENT = Intent(dtype="float16", max_input_len=4096, max_seq_len=8192, max_num_tokens=8192)


@pytest.fixture
def llama_8b(tmp_path: Path) -> Checkpoint:
    return read_checkpoint(write_config(tmp_path, "llama-3-8b"))


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("mistral-7b", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-8b", 8_190_735_360),
        ("gemma-2b", 2_506_172_416),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-3-1b", 999_885_952),
        ("phi-3-mini", 3_821_079_552),
        ("gpt2", 124_439_808),
    ],
)
def test_published_parameter_counts(tmp_path: Path, name: str, weights: int) -> None:
    assert parameter_count(read_checkpoint(write_config(tmp_path, name))) == weights


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-2-7b", 524_288),
        ("llama-3-8b", 131_072),
        ("llama-3-70b", 327_680),
        ("mistral-7b", 131_072),
        ("mixtral-8x7b", 131_072),
        ("qwen2.5-7b", 57_344),
        ("gemma-2-9b", 344_064),
        ("gpt2", 36_864),
    ],
)
def test_published_kv_cache_sizes(tmp_path: Path, name: str, size: int) -> None:
    checkpoint = read_checkpoint(write_config(tmp_path, name))
    assert kv_bytes_per_token(checkpoint, INTENT) == size


def test_all_known_architectures_are_tested() -> None:
    from ops.deployment.architectures import ARCHITECTURES  # noqa: PLC0415

    assert {config["architectures"][0] for config in CONFIGS.values()} == set(ARCHITECTURES)


def test_weights_of_llama_8b(llama_8b: Checkpoint) -> None:
    assert weight_bytes(llama_8b, INTENT) == 16_060_522_496  # 16.06 GB
    # Two GPUs share all weights except the embedding table and the norms, which both have.
    table, norms = 128256 * 4096, 65 * 4096
    half = (8_030_261_248 - table - norms) // 2 + table + norms
    assert weight_bytes(llama_8b, replace(INTENT, tp=2)) == 2 * half
    # Two stages of 16 layers. The first has the embedding, the second has lm_head.
    stage = table + 16 * (8_030_261_248 - 2 * table - 4096) // 32 + 4096
    assert weight_bytes(llama_8b, replace(INTENT, pp=2)) == 2 * stage


def test_kv_cache_is_split_until_each_rank_has_one_head(llama_8b: Checkpoint) -> None:
    sizes = [kv_bytes_per_token(llama_8b, replace(INTENT, tp=tp)) for tp in (1, 2, 4, 8, 16)]
    assert sizes == [131_072, 65_536, 32_768, 16_384, 16_384]
    assert kv_bytes_per_token(llama_8b, replace(INTENT, pp=4)) == 32_768


def test_tied_tables_are_counted_once_for_the_model_and_twice_in_memory(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_config(tmp_path, "llama-3.2-1b"))
    assert weight_bytes(checkpoint, INTENT) == 2 * (1_235_814_400 + 128256 * 2048)


def test_workspace_grows_with_what_is_kept_of_a_step(llama_8b: Checkpoint) -> None:
    base = workspace_bytes(llama_8b, INTENT)
    gather = workspace_bytes(llama_8b, replace(INTENT, gather_context_logits=True))
    assert gather - base == 8192 * 128256 * 4
    assert workspace_bytes(llama_8b, replace(INTENT, max_num_tokens=16384)) > base
    beams = workspace_bytes(llama_8b, replace(INTENT, max_beam_width=2))
    assert beams - base == 3 * 64 * 128256 * 4


def test_the_pool_is_what_weights_and_workspace_leave(llama_8b: Checkpoint) -> None:
    memory = plan_memory(llama_8b, INTENT, GPUS["H100"])
    assert memory.kv_cache is not None
    free = GPUS["H100"].memory - memory.weights - memory.workspace
    assert memory.kv_cache.fraction == 0.9
    assert memory.kv_cache.lora_fraction is None
    assert memory.kv_cache.bytes == int(free * 0.9)
    assert memory.kv_cache.tokens == memory.kv_cache.bytes // 131_072
    assert memory.fits(INTENT)


def test_the_longest_request_decides_whether_it_fits(llama_8b: Checkpoint) -> None:
    """Check that 24 GB less 16.06 GB of weights fit 8,192 tokens, but not with 16 beams."""
    assert plan_memory(llama_8b, INTENT, GPUS["L4"]).fits(INTENT)
    wide = replace(INTENT, max_beam_width=16)
    memory = plan_memory(llama_8b, wide, GPUS["L4"])
    assert memory.kv_cache is not None
    assert not memory.fits(wide)
    assert plan_memory(llama_8b, INTENT, GPUS["T4"]).kv_cache is None
    assert plan_memory(llama_8b, INTENT, None).fits(INTENT) is None


@given(
    rank=st.integers(1, 64),
    adapters=st.integers(1, 200),
    gpu=st.sampled_from(["L40S", "H100", "H200"]),
)
def test_the_settings_hold_the_adapters_on_host_and_gpu(rank: int, adapters: int, gpu: str) -> None:
    checkpoint = Checkpoint(
        folder=Path("llama"),
        architecture="LlamaForCausalLM",
        dtype=None,
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_size=128,
        intermediate_size=14336,
        num_experts=0,
        vocab_size=128256,
        max_position_embeddings=8192,
        attention_bias=False,
        tied_embeddings=False,
        quantization=None,
    )
    modules = ("attn_q", "attn_k", "attn_v", "mlp_4h_to_h")
    intent = replace(INTENT, lora_modules=modules, max_lora_rank=rank, lora_adapters=adapters)
    memory = plan_memory(checkpoint, intent, GPUS[gpu])
    lora, kv = memory.lora, memory.kv_cache
    assert lora is not None
    if kv is None:
        assert lora.bytes > 0.8 * (GPUS[gpu].memory - memory.weights - memory.workspace)
        return
    assert kv.lora_fraction is not None
    assert 0 < kv.fraction <= 0.9
    assert 0 < kv.lora_fraction <= 1
    free = GPUS[gpu].memory - memory.weights - memory.workspace
    on_gpu = int((free - kv.bytes) * kv.lora_fraction)
    rows = [ModuleRows(module, rank, tuple(range(32))) for module in modules]
    fit = cache_fit(
        base_model(checkpoint, intent),
        [rows] * adapters,
        CacheSettings(lora.bytes, on_gpu, lora.optimal_adapter_size, lora.max_adapter_size),
    )
    assert fit.host_holds_all
    assert fit.gpu_holds_all


def test_no_lora_cache_without_modules(llama_8b: Checkpoint) -> None:
    assert lora_cache(llama_8b, INTENT) is None


@pytest.mark.parametrize("name", ["h100", "H100", "A100-80GB", "a100-40", "l40s"])
def test_gpus_by_name(name: str) -> None:
    gpu = find_gpu(name)
    assert 20 * GB < gpu.memory < 90 * GB


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"--gpu: found 'H900'; allowed: T4, A10, .*B200"):
        find_gpu("H900")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["OPTForCausalLM"]}, 'architectures: found ["OPTForCausalLM"]; allowed'),
        ({"architectures": None}, "architectures: found null; allowed: one of LlamaForCausalLM"),
        ({"hidden_size": "4096"}, 'hidden_size: found "4096"; allowed: a positive integer'),
        ({"num_hidden_layers": 0}, "num_hidden_layers: found 0"),
        ({"num_hidden_layers": None}, "num_hidden_layers: found null"),
        ({"num_attention_heads": True}, "num_attention_heads: found true"),
        ({"tie_word_embeddings": "no"}, 'tie_word_embeddings: found "no"; allowed: true or false'),
        ({"torch_dtype": 16}, "torch_dtype: found 16; allowed: a string"),
        ({"pretrained_config": {}}, "is that of an engine; name the Hugging Face folder"),
    ],
)
def test_wrong_configurations(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = write_config(tmp_path, "llama-3-8b", **changes)
    with pytest.raises(ConfigError) as raised:
        read_checkpoint(folder)
    assert str(folder / "config.json") in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_what_is_no_configuration(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "file", "method"),
    [
        ({}, None, None),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, None, "gptq"),
        ({"quantization_config": {}}, None, "unknown"),
        ({}, "hf_quant_config.json", "modelopt"),
    ],
)
def test_quantized_weights_are_noticed(
    tmp_path: Path, changes: dict[str, Any], file: str | None, method: str | None
) -> None:
    folder = write_config(tmp_path, "llama-3-8b", **changes)
    if file:
        (folder / file).write_text(json.dumps({}), encoding="utf-8")
    assert read_checkpoint(folder).quantization == method
