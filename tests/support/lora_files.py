"""PEFT adapters written for a test, and the unpacked tensors of a converted adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from adapters.adapter import MODULE_NAMES, Converted, make_converted
from adapters.base_model import BaseModel
from adapters.modules import module_sizes
from triton_repo.cpu_executor.engine import LLAMA_LORA_MODULES

Array = npt.NDArray[Any]

BASE = BaseModel(
    names=("demo",),
    architecture="LlamaForCausalLM",
    dtype="float16",
    num_hidden_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_size=4,
    intermediate_size=12,
    num_experts=0,
    lora_target_modules=LLAMA_LORA_MODULES,
    max_lora_rank=8,
)
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "org/demo",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
}
Q = "model.layers.0.self_attn.q_proj"
SIZES = {"q_proj": (8, 8), "k_proj": (8, 4), "v_proj": (8, 4), "o_proj": (8, 8)}


def key(module: str, side: str) -> str:
    return f"base_model.model.{module}.lora_{side}.weight"


def pair(
    module: str, rank: int, sizes: tuple[int, int], dtype: Any = np.float32, seed: int = 1
) -> dict[str, Array]:
    """Return random A [rank, in] and B [out, rank] for one linear layer."""
    random = np.random.default_rng([seed, *module.encode()])
    return {
        key(module, "A"): random.normal(size=(rank, sizes[0])).astype(dtype),
        key(module, "B"): random.normal(size=(sizes[1], rank)).astype(dtype),
    }


def qv_tensors(rank: int = 4, layers: int = 2, seed: int = 1) -> dict[str, Array]:
    """Return q_proj and v_proj tensors for each layer of `BASE`."""
    tensors: dict[str, Array] = {}
    for layer in range(layers):
        for name in ("q_proj", "v_proj"):
            module = f"model.layers.{layer}.self_attn.{name}"
            tensors |= pair(module, rank, SIZES[name], seed=seed)
    return tensors


def write_peft(folder: Path, tensors: dict[str, Array], **changes: Any) -> Path:
    """Write an adapter folder. `changes` replace or add fields of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def to_bfloat16(path: Path) -> None:
    """Change the dtype of a uint16 file to bfloat16 in its header."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].replace(b'"U16"', b'"BF16"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


def unpack(converted: Converted, base: BaseModel) -> dict[tuple[str, int], tuple[Array, Array]]:
    """Return (module, layer) -> A [rank, in] and B [out, rank] in float32, after checking the
    padding.
    """
    weights = np.frombuffer(converted.weights, "<u2").reshape(converted.rows, converted.width)
    found = {}
    for row, (module, layer, rank) in zip(weights, converted.config_rows(), strict=True):
        inputs, outputs = module_sizes(MODULE_NAMES[module], base)
        a, b = rank * inputs, rank * outputs
        assert not row[a + b :].any()
        values = from_bits(row, converted.dtype)
        found[MODULE_NAMES[module], layer] = (
            values[:a].reshape(rank, inputs),
            values[a : a + b].reshape(outputs, rank),
        )
    return found


def from_bits(bits: Array, dtype: str) -> Array:
    if dtype == "float16":
        return bits.view("<f2").astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def content(number: int, nbytes: int = 4096) -> Converted:
    """Return a converted adapter with random weights, and so its own digest."""
    rows = [(1, 0, 4), (2, 0, 4), (3, 1, 4)]
    width = -(-nbytes // (2 * len(rows)))
    weights = np.random.default_rng(number).bytes(2 * len(rows) * width)
    return make_converted("float16", rows, width, weights)


def linear_content(number: int, rank: int = 4) -> Converted:
    """Return a converted adapter of q for both layers of `BASE`, which converts back to PEFT."""
    rows = [(1, 0, rank), (1, 1, rank)]
    width = rank * (8 + 8)
    values = np.random.default_rng(number).normal(size=(2, width)).astype("<f2")
    return make_converted("float16", rows, width, values.tobytes())
