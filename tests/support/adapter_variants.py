"""PEFT adapters in the variants that training tools write: files, names, fields and dtypes.

Each variant computes its expected `deltas` in float64: B A times the variant's scale. The expected
result thus depends neither on tensor names nor on rank and alpha patterns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.float64_llama import Float64Llama, Floats
from tests.support.lora_files import Array, to_bfloat16, write_peft

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
ALL = (*ATTENTION, *MLP)
QV = ("self_attn.q_proj", "self_attn.v_proj")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

Key = Callable[[int, str, str], str]
Of = Callable[[int, str], float]


def _plain(layer: int, inside: str, side: str) -> str:
    return f"base_model.model.model.layers.{layer}.{inside}.lora_{side}.weight"


def _keys(form: str) -> Key:
    """Return a function that formats tensor names. `form` has {layer}, {inside} and {side}."""
    return lambda layer, inside, side: form.format(layer=layer, inside=inside, side=side)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """An adapter to write. `rank` and `alpha` are the expected values for each layer and module.

    `config` has fields of adapter_config.json.
    """

    modules: tuple[str, ...] = QV
    layers: tuple[int, ...] | None = None
    rank: Of = lambda layer, inside: 8
    alpha: Of = lambda layer, inside: 16
    rslora: bool = False
    dtype: str = "F32"
    key: Key = _plain
    config: Mapping[str, Any] = field(default_factory=dict)
    byte_order_mark: bool = False
    gain: float = 0.03

    def list_modules(self, model: Float64Llama) -> list[tuple[int, str]]:
        layers = range(model.layers) if self.layers is None else self.layers
        return [(layer, inside) for layer in layers for inside in self.modules]

    def write(self, folder: Path, model: Float64Llama) -> dict[str, Floats]:
        """Write the adapter. Return the expected weight deltas by the linear layers' paths."""
        tensors: dict[str, Array] = {}
        deltas: dict[str, Floats] = {}
        for layer, inside in self.list_modules(model):
            module = f"model.layers.{layer}.{inside}"
            inputs, outputs = model.size(module)
            rank, alpha = int(self.rank(layer, inside)), self.alpha(layer, inside)
            random = np.random.default_rng([rank, *module.encode()])
            scale = alpha / (math.sqrt(rank) if self.rslora else rank)
            # Each variant changes the answers equally, for any scale.
            size = math.sqrt(self.gain / (abs(scale) * math.sqrt(rank)))
            pair = [random.normal(size=shape) * size for shape in ((rank, inputs), (outputs, rank))]
            stored = [self._quantize(values) for values in pair]
            for side, (written, _) in zip("AB", stored, strict=True):
                tensors[self.key(layer, inside, side)] = written
            deltas[module] = scale * (stored[1][1] @ stored[0][1])
        config = {"r": 8, "lora_alpha": 16, "target_modules": list(self.modules), **self.config}
        write_peft(folder, tensors, **config)
        if self.dtype == "BF16":
            to_bfloat16(folder / "adapter_model.safetensors")
        path = folder / "adapter_config.json"
        if self.byte_order_mark:
            path.write_bytes(_BYTE_ORDER_MARK + path.read_bytes())
        return deltas

    def _quantize(self, values: Floats) -> tuple[Array, Floats]:
        """Return the values as they are written, and the values after rounding."""
        if self.dtype == "BF16":
            bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            worth = (bits.astype(np.uint32) << 16).view(np.float32)
            return bits, worth.astype(np.float64)
        written = values.astype({"F32": np.float32, "F16": np.float16}[self.dtype])
        return written, written.astype(np.float64)


def _first_layer(first: float, others: float) -> Of:
    return lambda layer, inside: first if layer == 0 else others


def _of(chosen: str, value: float, others: float) -> Of:
    return lambda layer, inside: value if inside.endswith(chosen) else others


_PEFT = "base_model.model.model.layers.{layer}.{inside}.lora_{side}"
_TAIL = "{layer}.{inside}.lora_{side}.weight"
_FSDP = "_fsdp_wrapped_module"
_SWIFT = {
    "swift_type": "LORA",
    "lora_dtype": "bfloat16",
    "lorap_lr_ratio": 16.0,
    "lorap_emb_lr": 1e-06,
    "use_qa_lora": False,
    "use_merged_linear": False,
    "enable_lora": None,
    "model_key_mapping": None,
}

VARIANTS: dict[str, Variant] = {
    # Variants of modules and layers.
    "q and v": Variant(),
    "q alone": Variant(modules=ATTENTION[:1]),
    "k alone": Variant(modules=ATTENTION[1:2]),
    "o alone": Variant(modules=ATTENTION[3:]),
    "gate alone": Variant(modules=MLP[:1]),
    "up alone": Variant(modules=MLP[1:2]),
    "down alone": Variant(modules=MLP[2:]),
    "all modules": Variant(modules=ALL),
    "one layer": Variant(modules=ALL, layers=(3,)),
    "first and last layer": Variant(layers=(0, 5)),
    # Variants of ranks, scales and dtypes.
    "rank 1": Variant(rank=lambda *_: 1, config={"r": 1}),
    "rank 64": Variant(rank=lambda *_: 64, config={"r": 64}),
    "alpha below the rank": Variant(alpha=lambda *_: 1, config={"lora_alpha": 1}),
    "alpha no whole number": Variant(alpha=lambda *_: 2.75, config={"lora_alpha": 2.75}),
    "negative alpha": Variant(alpha=lambda *_: -16, config={"lora_alpha": -16}),
    "rank-stabilised": Variant(modules=ALL, rslora=True, config={"use_rslora": True}),
    "float16": Variant(modules=ALL, dtype="F16"),
    "bfloat16": Variant(modules=ALL, dtype="BF16"),
    # Variants of rank and alpha patterns.
    "rank of one module": Variant(rank=_of("v_proj", 3, 8), config={"rank_pattern": {"v_proj": 3}}),
    "alpha of one module": Variant(
        alpha=_of("q_proj", 40, 16), config={"alpha_pattern": {"q_proj": 40}}
    ),
    "ranks and alphas of one layer": Variant(
        rank=_first_layer(2, 8),
        alpha=_first_layer(24, 16),
        config={
            "rank_pattern": {r"model\.layers\.0\.self_attn\.(q|v)_proj": 2},
            "alpha_pattern": {"^model.layers.0.": 1, r"layers\.0\..*": 24},
        },
    ),
    "ranks that are floats": Variant(
        rank=_of("v_proj", 4, 16), config={"r": 16.0, "rank_pattern": {"v_proj": 4.0}}
    ),
    # Variants of tensor names.
    "default adapter's name": Variant(key=_keys(_PEFT + ".default.weight")),
    "another adapter's name": Variant(key=_keys(_PEFT + ".0_SwiftLoRA.weight")),
    "without PEFT's prefix": Variant(key=_keys("model.layers." + _TAIL)),
    "without any prefix": Variant(modules=ALL, key=_keys("layers." + _TAIL)),
    "compiled model": Variant(key=_keys("base_model.model._orig_mod.model.layers." + _TAIL)),
    "compiled adapter": Variant(key=_keys("_orig_mod.base_model.model.model.layers." + _TAIL)),
    "data parallel": Variant(key=_keys("module.base_model.model.model.layers." + _TAIL)),
    "FSDP": Variant(
        modules=ALL,
        key=_keys(
            f"{_FSDP}.base_model.model.model.layers.{{layer}}.{_FSDP}.{{inside}}.lora_{{side}}"
            f".default.{_FSDP}.weight"
        ),
    ),
    "checkpointed layers": Variant(
        key=_keys(
            "base_model.model.model.layers.{layer}._checkpoint_wrapped_module.{inside}"
            ".lora_{side}.weight"
        )
    ),
    "all wrappers, and patterns": Variant(
        modules=ALL,
        rank=_first_layer(4, 8),
        alpha=_of("down_proj", 32, 16),
        key=_keys(
            f"module.{_FSDP}._orig_mod.model.layers.{{layer}}.{_FSDP}._checkpoint_wrapped_module"
            ".{inside}.lora_{side}.default.weight"
        ),
        config={
            "rank_pattern": {r"model.layers.0\..*": 4},
            "alpha_pattern": {"down_proj": 32},
        },
    ),
    "text model of a multimodal one": Variant(
        modules=ALL,
        alpha=_first_layer(64, 16),
        key=_keys("base_model.model.model.language_model.layers." + _TAIL),
        config={
            "task_type": None,
            "alpha_pattern": {r"model.language_model.layers.0\..*": 64},
        },
    ),
    "text model of an older multimodal one": Variant(
        key=_keys("base_model.model.language_model.model.layers." + _TAIL)
    ),
    # Variants of configuration fields.
    "no bias": Variant(config={"bias": None}),
    "byte order mark": Variant(byte_order_mark=True),
    "ms-swift": Variant(config=_SWIFT, key=_keys(_PEFT + ".default.weight")),
    "targets as an expression": Variant(
        config={"target_modules": r".*\.self_attn\.(q|v)_proj", "layers_pattern": "layers"}
    ),
    "trained on a quantized copy": Variant(
        config={"base_model_name_or_path": "unsloth/demo-unsloth-bnb-4bit"}
    ),
    "trained in a folder": Variant(config={"base_model_name_or_path": "C:\\out\\Demo\\"}),
}
assert len(VARIANTS) == 40
