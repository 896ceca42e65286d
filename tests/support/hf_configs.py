"""config.json of public models: the fields that affect an engine, as on their model pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _config(
    architecture: str, hidden: int, mlp: int, layers: int, heads: int, kv: int, vocab: int
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": 8192,
        "torch_dtype": "bfloat16",
    }


_LLAMA = "LlamaForCausalLM"
CONFIGS: dict[str, dict[str, Any]] = {
    "llama-2-7b": _config(_LLAMA, 4096, 11008, 32, 32, 32, 32000),
    "llama-3-8b": _config(_LLAMA, 4096, 14336, 32, 32, 8, 128256)
    | {"max_position_embeddings": 131072},
    "llama-3-70b": _config(_LLAMA, 8192, 28672, 80, 64, 8, 128256),
    "llama-3.2-1b": _config(_LLAMA, 2048, 8192, 16, 32, 8, 128256)
    | {"head_dim": 64, "tie_word_embeddings": True},
    "mistral-7b": _config("MistralForCausalLM", 4096, 14336, 32, 32, 8, 32000),
    "mixtral-8x7b": _config("MixtralForCausalLM", 4096, 14336, 32, 32, 8, 32000)
    | {"num_local_experts": 8},
    "qwen2.5-7b": _config("Qwen2ForCausalLM", 3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-0.5b": _config("Qwen2ForCausalLM", 896, 4864, 24, 14, 2, 151936)
    | {"tie_word_embeddings": True},
    "qwen3-8b": _config("Qwen3ForCausalLM", 4096, 12288, 36, 32, 8, 151936) | {"head_dim": 128},
    "gemma-2b": _config("GemmaForCausalLM", 2048, 16384, 18, 8, 1, 256000) | {"head_dim": 256},
    "gemma-2-9b": _config("Gemma2ForCausalLM", 3584, 14336, 42, 16, 8, 256000) | {"head_dim": 256},
    "gemma-3-1b": _config("Gemma3ForCausalLM", 1152, 6912, 26, 4, 1, 262144) | {"head_dim": 256},
    "phi-3-mini": _config("Phi3ForCausalLM", 3072, 8192, 32, 32, 32, 32064),
    # GPT-2 has its own field names.
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_inner": None,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
}


def write_config(folder: Path, name: str, **changes: Any) -> Path:
    """Write `folder`/`name`, a model folder with only config.json."""
    model = folder / name
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIGS[name] | changes), encoding="utf-8")
    return model
