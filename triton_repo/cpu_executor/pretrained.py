"""Translation of a Hugging Face ``config.json`` to TensorRT-LLM's ``pretrained_config``.

A setting that the CPU executor does not implement raises an error that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# TensorRT-LLM's names of the architectures.
LLAMA = "LlamaForCausalLM"
GPT = "GPTForCausalLM"


def pretrained_config(hf: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the section of an engine's ``config.json`` that describes the model.

    ``hf`` may have the field ``least_iteration_ms``, which only the CPU executor reads. It is the
    minimum duration of an iteration in milliseconds: after a faster iteration, the executor sleeps
    for the remaining time. This leaves the CPU to other processes, as if a GPU ran the iteration.
    Statistics report the duration without the sleep.

    Args:
        hf: contents of the Hugging Face ``config.json``.
        dtype: data type of the engine.

    Raises ``ValueError`` for an architecture or a setting that the CPU executor does not implement.
    """
    found = hf.get("architectures")
    readers = {"LlamaForCausalLM": _llama, "GPT2LMHeadModel": _gpt2}
    if not isinstance(found, list) or len(found) != 1 or found[0] not in readers:
        raise ValueError(f"architectures: found {found}, allowed one of {', '.join(readers)}")
    return {
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": hf["vocab_size"],
        "least_iteration_ms": hf.get("least_iteration_ms", 0),
        **readers[found[0]](hf),
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
    }


def _llama(hf: Mapping[str, Any]) -> dict[str, Any]:
    _require(hf, hidden_act="silu")
    # Read both formats: transformers 5 stores all rotary settings in rope_parameters, earlier
    # releases in rope_scaling.
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "linear", "llama3"):
        raise ValueError(f"rope_type: found {rope_type}, allowed default, linear, llama3")
    heads = hf["num_attention_heads"]
    return {
        "architecture": LLAMA,
        "num_hidden_layers": hf["num_hidden_layers"],
        "hidden_size": hf["hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": hf.get("num_key_value_heads") or heads,
        "head_size": hf.get("head_dim") or hf["hidden_size"] // heads,
        "intermediate_size": hf["intermediate_size"],
        "max_position_embeddings": hf.get("max_position_embeddings", 2048),
        "hidden_act": "silu",
        "norm_epsilon": hf.get("rms_norm_eps", 1e-6),
        "position_embedding_type": "rope_gpt_neox",
        "rotary_base": rope.get("rope_theta") or hf.get("rope_theta", 10000.0),
        "rotary_scaling": None if rope_type == "default" else {**rope, "rope_type": rope_type},
        "attn_bias": bool(hf.get("attention_bias", False)),
        "mlp_bias": bool(hf.get("mlp_bias", False)),
        "share_embedding_table": bool(hf.get("tie_word_embeddings", False)),
    }


def _gpt2(hf: Mapping[str, Any]) -> dict[str, Any]:
    _require(
        hf,
        activation_function="gelu_new",
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    hidden, heads = hf["n_embd"], hf["n_head"]
    return {
        "architecture": GPT,
        "gpt_variant": "gpt2",
        "num_hidden_layers": hf["n_layer"],
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_size": hidden // heads,
        "intermediate_size": hf.get("n_inner") or 4 * hidden,
        "max_position_embeddings": hf["n_positions"],
        "hidden_act": "gelu",
        "norm_epsilon": hf.get("layer_norm_epsilon", 1e-5),
        "position_embedding_type": "learned_absolute",
        "bias": True,
        "share_embedding_table": bool(hf.get("tie_word_embeddings", True)),
    }


def _require(hf: Mapping[str, Any], **only: Any) -> None:
    """Raise ValueError if ``hf`` has another value for one of the settings in ``only``."""
    for name, allowed in only.items():
        if hf.get(name, allowed) != allowed:
            raise ValueError(f"{name}: found {hf[name]}, allowed {allowed}")
