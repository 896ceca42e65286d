"""Mapping of PEFT modules to TensorRT-LLM's LoRA modules, and the sizes of LoRA modules.

Sources, in TensorRT-LLM v0.17:

- Names: `hf_modules_to_trtllm_modules` of examples/hf_lora_convert.py, `lora_manager.py`, and
  `trtllm_modules_to_hf_modules` of the models.
- Sizes: `LoraModule::createLoraModules` (cpp/tensorrt_llm/runtime/loraModule.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from adapters.base_model import BaseModel
from adapters.errors import UnsupportedEngine

Kind = Literal["plain", "fused_qkv", "fused_gate_up", "expert"]
# Pattern of a number without leading zeros. With leading zeros, one layer could have several names,
# such as `layers.1` and `layers.01`.
_NUMBER = "(?:0|[1-9][0-9]{0,5})"


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer of the Hugging Face model, and the LoRA module to which it is converted.

    If the engine was built without the LoRA module of a fused layer such as qkv, the layer is
    converted to several LoRA modules, `parts`. `parts` has the order of the rows in the layer's B:
    the first rows of B belong to the first module.
    """

    module: str
    kind: Kind = "plain"
    parts: tuple[str, ...] = ()


class ModuleLocation(NamedTuple):
    """Position of a linear layer in a model. `inside` is the path within the transformer layer."""

    layer: int
    expert: int | None
    inside: str
    projection: Projection


@dataclass(frozen=True, slots=True)
class Family:
    """Model family: models whose transformer layers have the same module names.

    `layers` is the path of the list of layers. Keys of `projections` are paths within one layer,
    with ``*`` for an expert's number.
    """

    layers: str
    projections: Mapping[str, Projection]

    def locate(self, module_path: str) -> ModuleLocation | None:
        """Return the location of a module; None if the family does not have the module."""
        found = re.fullmatch(rf"{re.escape(self.layers)}\.({_NUMBER})\.(.+)", module_path)
        if found is None:
            return None
        inside = re.sub(rf"\.{_NUMBER}\.", ".*.", found.group(2))
        projection = self.projections.get(inside)
        if projection is None:
            return None
        expert = re.search(rf"\.({_NUMBER})\.", found.group(2))
        number = int(expert.group(1)) if expert else None
        return ModuleLocation(int(found.group(1)), number, inside, projection)


_ATTENTION = {
    "self_attn.q_proj": Projection("attn_q"),
    "self_attn.k_proj": Projection("attn_k"),
    "self_attn.v_proj": Projection("attn_v"),
    "self_attn.o_proj": Projection("attn_dense"),
}
# Map gate_proj to mlp_h_to_4h and up_proj to mlp_gate, the reverse of what the names suggest.
# TensorRT-LLM's GatedMLP calls the half with the activation `fc` (h_to_4h), and the other half
# `gate`.
LLAMA = Family(
    "model.layers",
    {
        **_ATTENTION,
        "mlp.gate_proj": Projection("mlp_h_to_4h"),
        "mlp.up_proj": Projection("mlp_gate"),
        "mlp.down_proj": Projection("mlp_4h_to_h"),
    },
)
MIXTRAL = Family(
    "model.layers",
    {
        **_ATTENTION,
        "block_sparse_moe.experts.*.w1": Projection("moe_h_to_4h", "expert"),
        "block_sparse_moe.experts.*.w2": Projection("moe_4h_to_h", "expert"),
        "block_sparse_moe.experts.*.w3": Projection("moe_gate", "expert"),
        "block_sparse_moe.gate": Projection("moe_router"),
    },
)
PHI3 = Family(
    "model.layers",
    {
        "self_attn.qkv_proj": Projection("attn_qkv", "fused_qkv", ("attn_q", "attn_k", "attn_v")),
        "self_attn.o_proj": Projection("attn_dense"),
        "mlp.gate_up_proj": Projection("mlp_gate_up", "fused_gate_up", ("mlp_h_to_4h", "mlp_gate")),
        "mlp.down_proj": Projection("mlp_4h_to_h"),
    },
)
# Do not transpose A and B for GPT-2, although its layers are Conv1D with a weight of shape [in,
# out]. PEFT saves A as [r, in] and B as [out, r], as for other models. The PEFT setting
# `fan_in_fan_out` transposes only the product of B and A.
GPT = Family(
    "transformer.h",
    {
        "attn.c_attn": Projection("attn_qkv", "fused_qkv", ("attn_q", "attn_k", "attn_v")),
        "attn.c_proj": Projection("attn_dense"),
        "mlp.c_fc": Projection("mlp_h_to_4h"),
        "mlp.c_proj": Projection("mlp_4h_to_h"),
    },
)

# Families by architecture. The keys are architecture names from an engine's pretrained_config or
# from a Hugging Face configuration.
FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "LLaMAForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "QWenForCausalLM:qwen2": LLAMA,
    "QWenForCausalLM:qwen3": LLAMA,
    "GemmaForCausalLM": LLAMA,
    "Gemma2ForCausalLM": LLAMA,
    "Gemma3ForCausalLM": LLAMA,
    "SyntheticForCausalLM": LLAMA,
    "MixtralForCausalLM": MIXTRAL,
    "Phi3ForCausalLM": PHI3,
    "GPTForCausalLM": GPT,
    "GPT2LMHeadModel": GPT,
}


def family(base: BaseModel) -> Family:
    """Return the family of a base model. Raise `UnsupportedEngine` for an unknown architecture."""
    # Treat a Llama model with experts as Mixtral: Mixtral engines are built with TensorRT-LLM's
    # Llama class.
    if base.num_experts and base.architecture in ("LlamaForCausalLM", "LLaMAForCausalLM"):
        return MIXTRAL
    found = FAMILIES.get(base.architecture)
    if found is None:
        raise UnsupportedEngine(
            "config.json", "architecture", base.architecture, ", ".join(FAMILIES)
        )
    return found


def module_sizes(module: str, base: BaseModel) -> tuple[int, int]:
    """Return the sizes (in, out) of a LoRA module in the TensorRT-LLM runtime.

    The sizes are for the complete module, before any tensor parallel split. A row with rank r has
    ``r * (in + out)`` values.
    """
    hidden, mlp, experts = base.hidden_size, base.intermediate_size, base.num_experts
    q = base.num_attention_heads * base.head_size
    kv = base.num_key_value_heads * base.head_size
    sizes = {
        "attn_qkv": (hidden, q + 2 * kv),
        "attn_q": (hidden, q),
        "attn_k": (hidden, kv),
        "attn_v": (hidden, kv),
        "attn_dense": (hidden, hidden),
        "mlp_h_to_4h": (hidden, mlp),
        "mlp_gate": (hidden, mlp),
        "mlp_4h_to_h": (mlp, hidden),
        "mlp_gate_up": (hidden, 2 * mlp),
        "moe_h_to_4h": (hidden * experts, mlp * experts),
        "moe_gate": (hidden * experts, mlp * experts),
        "moe_4h_to_h": (mlp * experts, hidden * experts),
        "moe_router": (hidden, experts),
    }
    if module not in sizes:
        raise UnsupportedEngine(
            "config.json", "lora_target_modules", module, ", ".join(sizes), "its sizes are unknown"
        )
    return sizes[module]


def splits_input(module: str) -> bool:
    """Return True if tensor parallelism splits A along `in`, False if it splits B along `out`."""
    return module in ("attn_dense", "mlp_4h_to_h", "moe_4h_to_h")
