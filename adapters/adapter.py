"""The two representations of a LoRA adapter. Both are immutable.

`Adapter` describes the files that PEFT saved. `Converted` has the two tensors that are sent to
TensorRT-LLM.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from adapters.patterns import ModulePattern

Dtype = Literal["float16", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float16", "bfloat16")
ITEM_BYTES = 2

# Values of TensorRT-LLM's LoraModule::ModuleType (cpp/include/tensorrt_llm/runtime/loraModule.h).
MODULE_IDS: Mapping[str, int] = {
    "attn_qkv": 0,
    "attn_q": 1,
    "attn_k": 2,
    "attn_v": 3,
    "attn_dense": 4,
    "mlp_h_to_4h": 5,
    "mlp_4h_to_h": 6,
    "mlp_gate": 7,
    "cross_attn_qkv": 8,
    "cross_attn_q": 9,
    "cross_attn_k": 10,
    "cross_attn_v": 11,
    "cross_attn_dense": 12,
    "moe_h_to_4h": 13,
    "moe_4h_to_h": 14,
    "moe_gate": 15,
    "moe_router": 16,
    "mlp_router": 17,
    "mlp_gate_up": 18,
    "shared_expert_h_to_4h": 19,
    "shared_expert_4h_to_h": 20,
    "shared_expert_gate": 21,
}
MODULE_NAMES: Mapping[int, str] = {number: name for name, number in MODULE_IDS.items()}
LAID_OUT_BY_TP = frozenset({"attn_qkv", "mlp_gate_up", "moe_h_to_4h", "moe_4h_to_h", "moe_gate"})
"""Modules whose converted rows depend on the engine's tensor parallel size (`tp_size`).

In fused modules, the rows that one GPU needs are stored next to each other. Expert modules are
converted only for engines with a `tp_size` of 1, because TensorRT-LLM cannot split the rows of
experts over several GPUs (see `adapters.plan`).
"""

_CONFIG_ROW = struct.Struct("<3i")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a safetensors file. `start` and `stop` are byte offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LoraSettings:
    """Validated rank and scaling settings of ``adapter_config.json``."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[ModulePattern, int], ...]
    alpha_pattern: tuple[tuple[ModulePattern, float], ...]
    base_model_name_or_path: str | None

    def scale(self, alpha: float, rank: int) -> float:
        """Return the factor by which the product of B and A is multiplied: alpha / rank.

        With rank-stabilised LoRA (arXiv 2312.03732), the factor is alpha / sqrt(rank).
        """
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True, slots=True)
class Adapter:
    """A PEFT adapter whose configuration and safetensors header have been validated.

    The tensors' values have not been read yet. `identity` is (inode, size in bytes, mtime in ns) of
    the weights file during validation. `adapters.convert` reads the values later, and refuses a
    file whose identity has changed since then.
    """

    settings: LoraSettings
    weights_file: Path
    identity: tuple[int, int, int]
    tensors: Mapping[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class ModuleRows:
    """A module of an adapter, and the layers in which its LoRA matrices have the rank `rank`.

    `layers` has the numbers of these layers, sorted.
    """

    module: str
    rank: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Converted:
    """An adapter as TensorRT-LLM's inputs `lora_config` and `lora_weights`.

    Each row of the two tensors belongs to one module in one layer. `config` and `weights` are the
    exact bytes that are sent to Triton, in little-endian order.

    Attributes:
        config: int32 [1, rows, 3]. Each row has the module id, the layer and the rank.
        weights: [1, rows, width] in `dtype`. Each row has the values of A and B, in the order that
            `adapters.plan` describes.
        digest: the hex digest that `content_digest` computes from the two tensors.
        tp_size: tensor parallel size of the engines that can use the tensors. None if engines of
            any size can use them, or if the size is unknown. `digest` does not depend on
            `tp_size`, so a store whose keys are digests must store `tp_size` separately.
    """

    dtype: Dtype
    rows: int
    width: int
    config: bytes
    weights: bytes | bytearray | memoryview
    digest: str
    tp_size: int | None = None

    @property
    def task_id(self) -> int:
        return task_id(self.digest)

    @property
    def nbytes(self) -> int:
        """Size of the weights in bytes."""
        return self.rows * self.width * ITEM_BYTES

    def config_rows(self) -> Iterator[tuple[int, int, int]]:
        """Return an iterator of (module id, layer, rank) for each row of `config`, in order."""
        return _CONFIG_ROW.iter_unpack(self.config)

    @property
    def modules(self) -> tuple[ModuleRows, ...]:
        """The adapter's modules, sorted by module id, with one `ModuleRows` per module and rank."""
        layers: dict[tuple[int, int], list[int]] = {}
        for module, layer, rank in self.config_rows():
            layers.setdefault((module, rank), []).append(layer)
        return tuple(
            ModuleRows(MODULE_NAMES[module], rank, tuple(sorted(found)))
            for (module, rank), found in sorted(layers.items())
        )


def pack_config(rows: list[tuple[int, int, int]]) -> bytes:
    """Pack (module id, layer, rank) rows into the bytes of `lora_config`."""
    return b"".join(_CONFIG_ROW.pack(*row) for row in rows)


def content_digest(
    dtype: Dtype, rows: int, width: int, config: bytes, weights: bytes | bytearray | memoryview
) -> str:
    """Return the sha256 hex digest of an adapter's tensors.

    The hash covers one ASCII line ``lora <dtype> <rows> <width>`` + newline, then the bytes of
    `config`, then the bytes of `weights`. Equal tensors have equal digests on every machine.
    """
    digest = hashlib.sha256(f"lora {dtype} {rows} {width}\n".encode())
    digest.update(config)
    digest.update(weights)
    return digest.hexdigest()


def task_id(digest: str) -> int:
    """Return a `lora_task_id` derived from a digest, for adapters that are not in a registry.

    The id has the first 63 bits of the digest. If all these bits are 0, the id is 1. An attacker
    could construct two adapters whose digests begin with the same bits. Both adapters would then
    have the same id, so a registry uses random ids instead (`adapters.record.draw_task_id`).
    """
    return (int(digest[:16], 16) >> 1) or 1


def make_converted(
    dtype: Dtype,
    rows: list[tuple[int, int, int]],
    width: int,
    weights: bytes | bytearray | memoryview,
    tp_size: int | None = None,
) -> Converted:
    """Return a `Converted` from these rows and weights. Compute `config` and `digest`."""
    config = pack_config(rows)
    digest = content_digest(dtype, len(rows), width, config, weights)
    return Converted(
        dtype=dtype,
        rows=len(rows),
        width=width,
        config=config,
        weights=weights,
        digest=digest,
        tp_size=tp_size,
    )
