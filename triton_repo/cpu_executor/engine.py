"""Engine folders of the CPU executor, which contain the weights and a ``config.json``.

The ``config.json`` has the format of a TensorRT-LLM engine.

``build`` creates an engine folder from the Hugging Face folder of a Llama or GPT-2. ``load_config``
reads the configuration of an engine folder. A Hugging Face folder is also accepted as an engine,
with default limits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adapters.config_json import FILE, read_config
from triton_repo.cpu_executor import weights
from triton_repo.cpu_executor.pretrained import GPT, LLAMA, pretrained_config

SYNTHETIC = "SyntheticForCausalLM"
ARCHITECTURES = (LLAMA, GPT, SYNTHETIC)
LLAMA_LORA_MODULES = (
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_dense",
    "mlp_h_to_4h",
    "mlp_4h_to_h",
    "mlp_gate",
)
_LORA_MODULES: dict[str, tuple[str, ...]] = {LLAMA: LLAMA_LORA_MODULES, GPT: ()}


@dataclass(frozen=True)
class CpuEngineConfig:
    """Model sizes and limits of an engine. The names are those of TensorRT-LLM."""

    architecture: str
    dtype: str
    vocab_size: int
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    norm_epsilon: float
    rotary_base: float
    rotary_scaling: dict[str, Any] | None
    max_batch_size: int
    max_input_len: int
    max_seq_len: int
    max_num_tokens: int
    max_beam_width: int
    gather_context_logits: bool
    gather_generation_logits: bool
    tokens_per_block: int
    use_paged_context_fmha: bool
    lora_target_modules: tuple[str, ...]
    max_lora_rank: int
    max_draft_len: int
    max_prompt_embedding_table_size: int
    least_iteration_ms: float
    synthetic: dict[str, Any]


def build(
    hf_dir: str | Path,
    engine_dir: str | Path,
    *,
    dtype: str = "float16",
    max_batch_size: int = 64,
    max_input_len: int | None = None,
    max_seq_len: int | None = None,
    max_num_tokens: int = 8192,
    max_beam_width: int = 1,
    gather_context_logits: bool = False,
    gather_generation_logits: bool = False,
    tokens_per_block: int = 64,
    use_paged_context_fmha: bool = True,
    lora_target_modules: Sequence[str] = (),
    max_lora_rank: int = 64,
    max_draft_len: int = 0,
    max_prompt_embedding_table_size: int = 0,
) -> Path:
    """Build an engine folder from a Hugging Face folder, as ``trtllm-build`` does. Return its path.

    Lengths are in tokens.

    Args:
        hf_dir: the Hugging Face folder of a Llama or GPT-2.
        engine_dir: the folder to write.
        dtype: data type that LoRA tensors must have; the computation is always float32.
        max_input_len: limit of a prompt; None for the value of ``max_seq_len``.
        max_seq_len: limit of prompt plus output; None for the model's context length.
        lora_target_modules: modules that adapters may change; empty for an engine without LoRA.
        max_prompt_embedding_table_size: limit of the rows in the prompt tables (p-tuning) of all
            requests in a full batch.

    Raises ``ValueError`` for a model or an option that the CPU executor cannot run.
    """
    source, target = Path(hf_dir), Path(engine_dir)
    pretrained = pretrained_config(read_config(source).values, dtype)
    allowed = _LORA_MODULES[pretrained["architecture"]]
    unknown = sorted(set(lora_target_modules) - set(allowed))
    if unknown:
        raise ValueError(f"lora_target_modules: found {unknown}, allowed {allowed}")
    seq_len = max_seq_len or pretrained["max_position_embeddings"]
    if seq_len > pretrained["max_position_embeddings"]:
        limit = pretrained["max_position_embeddings"]
        raise ValueError(f"max_seq_len: found {seq_len}, allowed at most {limit}")
    config = {
        "version": "0.17.0",
        "pretrained_config": pretrained,
        "build_config": {
            "max_batch_size": max_batch_size,
            "max_input_len": max_input_len or seq_len,
            "max_seq_len": seq_len,
            "max_num_tokens": max_num_tokens,
            "max_beam_width": max_beam_width,
            "max_prompt_embedding_table_size": max_prompt_embedding_table_size,
            "max_draft_len": max_draft_len,
            "gather_context_logits": gather_context_logits,
            "gather_generation_logits": gather_generation_logits,
            "kv_cache_type": "PAGED",
            "lora_config": {
                "lora_target_modules": list(lora_target_modules),
                "max_lora_rank": max_lora_rank,
            },
            "plugin_config": {
                "tokens_per_block": tokens_per_block,
                "use_paged_context_fmha": use_paged_context_fmha,
                "lora_plugin": dtype if lora_target_modules else None,
                "dora_plugin": False,
            },
        },
    }
    target.mkdir(parents=True, exist_ok=True)
    single = source / "model.safetensors"
    if weights.files(source) == [single]:
        shutil.copyfile(single, target / "model.safetensors")
    else:
        weights.merge(source, target / "model.safetensors")
    (target / FILE).write_text(json.dumps(config, indent=2) + "\n")
    return target


def lora_modules(hf_dir: str | Path) -> tuple[str, ...]:
    """Return the modules that adapters may change in an engine built from a Hugging Face folder.

    The tuple is empty for a GPT-2.
    """
    hf = read_config(Path(hf_dir)).values
    return _LORA_MODULES[pretrained_config(hf, "float16")["architecture"]]


def load_config(engine_dir: str | Path) -> CpuEngineConfig:
    """Read the ``config.json`` of an engine folder or a Hugging Face folder.

    Raises ``ValueError`` for a model that the CPU executor cannot run.
    """
    folder = Path(engine_dir)
    raw: Mapping[str, Any] = read_config(folder).values
    if "pretrained_config" not in raw:
        raw = {"pretrained_config": pretrained_config(raw, "float16"), "build_config": {}}
    model, limits = raw["pretrained_config"], raw["build_config"]
    architecture = model["architecture"]
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{folder / FILE}: architecture: found {architecture}, allowed {ARCHITECTURES}"
        )
    plugin = limits.get("plugin_config", {})
    lora = limits.get("lora_config", {}) if plugin.get("lora_plugin") else {}
    heads = model.get("num_attention_heads", 1)
    hidden = model.get("hidden_size", 1)
    seq_len = limits.get("max_seq_len") or model["max_position_embeddings"]
    return CpuEngineConfig(
        architecture=architecture,
        dtype=model.get("dtype", "float16"),
        vocab_size=model["vocab_size"],
        num_hidden_layers=model.get("num_hidden_layers", 1),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=model.get("num_key_value_heads", heads),
        head_size=model.get("head_size", hidden // heads),
        intermediate_size=model.get("intermediate_size", 1),
        norm_epsilon=model.get("norm_epsilon", 1e-5),
        rotary_base=model.get("rotary_base", 10000.0),
        rotary_scaling=model.get("rotary_scaling"),
        max_batch_size=limits.get("max_batch_size", 64),
        max_input_len=limits.get("max_input_len", seq_len),
        max_seq_len=seq_len,
        max_num_tokens=limits.get("max_num_tokens", 8192),
        max_beam_width=limits.get("max_beam_width", 1),
        gather_context_logits=bool(limits.get("gather_context_logits", False)),
        gather_generation_logits=bool(limits.get("gather_generation_logits", False)),
        tokens_per_block=plugin.get("tokens_per_block", 64),
        use_paged_context_fmha=bool(plugin.get("use_paged_context_fmha", True)),
        lora_target_modules=tuple(lora.get("lora_target_modules", ())),
        max_lora_rank=lora.get("max_lora_rank", 64),
        max_draft_len=limits.get("max_draft_len", 0),
        max_prompt_embedding_table_size=limits.get("max_prompt_embedding_table_size", 0),
        least_iteration_ms=model.get("least_iteration_ms", 0),
        synthetic=raw.get("synthetic", {}),
    )
