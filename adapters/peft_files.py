"""Conversion of converted tensors back to PEFT files, for engines that read adapters from a disk.

The files are computed only from the converted tensors and their `tp_size`. The digest of the
tensors therefore identifies the files, too. The engine reads exactly the values that were
validated. In converted tensors, B is already multiplied by the LoRA scale, so the written
``adapter_config.json`` states a scale of 1.

TensorRT-LLM's LLM API (`lora_manager.py`) reads only `r`, `lora_alpha` and `use_rslora`. It
computes the scale of each module from the rank of its tensors, and ignores `rank_pattern` and
`alpha_pattern`. Therefore all modules are padded with zeros to the largest rank, and `lora_alpha`
is this rank.

See decision 028 in docs/decisions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from adapters.adapter import MODULE_NAMES, Converted
from adapters.base_model import BaseModel
from adapters.errors import ShapeMismatch, UnsupportedModule
from adapters.modules import Projection, family, module_sizes
from adapters.plan import placements

_FILE = "lora_weights"
_WHY = "these cannot be written back in PEFT form"

Bits = npt.NDArray[np.uint16]
Pair = tuple[Bits, Bits]
"""(A, B) of one linear layer, as the bits of 16-bit values. A is [rank, in], B is [out, rank]."""


@dataclass(frozen=True, slots=True)
class PeftFiles:
    """Contents of ``adapter_config.json`` and ``adapter_model.safetensors``.

    `header` and `tensors` together are the safetensors file. `modules` are the TensorRT-LLM LoRA
    modules that an engine needs for the adapter's layers.
    """

    config: bytes
    header: bytes
    tensors: tuple[Bits, ...]
    modules: frozenset[str]

    @property
    def nbytes(self) -> int:
        """Total size of both files in bytes."""
        return len(self.config) + len(self.header) + sum(bits.nbytes for bits in self.tensors)

    def weights(self) -> Iterator[bytes | memoryview]:
        """Yield the contents of the weights file in chunks, without copying the tensors."""
        yield self.header
        for bits in self.tensors:
            yield bits.reshape(-1).view(np.uint8).data


def peft_files(converted: Converted, base: BaseModel) -> PeftFiles:
    """Return the PEFT files of an adapter that was converted for `base`.

    `converted.tp_size` may differ from `base.tp_size`. Linear layers are supported, including fused
    layers. Experts are not supported.

    Raises:
        UnsupportedModule: the adapter changes experts, or a module is not a linear layer of this
            architecture.
        ShapeMismatch: the tensors belong to another base model.
        UnsupportedEngine: the architecture is unknown.
    """
    pairs, modules = _build_pairs(converted, base)
    rank = max(a.shape[0] for a, _ in pairs.values())
    tensors: dict[str, Bits] = {}
    for path, (a, b) in pairs.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = _pad(a, (rank, a.shape[1]))
        tensors[f"base_model.model.{path}.lora_B.weight"] = _pad(b, (b.shape[0], rank))
    config = {
        "base_model_name_or_path": base.names[0],
        "bias": "none",
        "lora_alpha": rank,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted({path.rsplit(".", 1)[-1] for path in pairs}),
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }
    dtype = "F16" if converted.dtype == "float16" else "BF16"
    header = _build_header(tensors, dtype)
    return PeftFiles(json.dumps(config).encode(), header, tuple(tensors.values()), modules)


def changes_nothing(converted: Converted, base: BaseModel) -> bool:
    """Return True if the adapter has no effect, because A or B is zero in each row.

    Raise `ShapeMismatch` for tensors of another base model.
    """
    pairs = _read_rows(converted, base).values()
    return not any(_has_values(a) and _has_values(b) for a, b in pairs)


def _has_values(bits: Bits) -> bool:
    return bool((bits & 0x7FFF).any())  # ignore the sign bit: 0x8000 is negative zero


def _build_pairs(converted: Converted, base: BaseModel) -> tuple[dict[str, Pair], frozenset[str]]:
    """Return the pair (A, B) of each linear layer, and the LoRA modules that the layers use.

    The keys of the pairs are paths such as ``model.layers.0.self_attn.q_proj``.
    """
    rows = _read_rows(converted, base)
    layout = family(base)
    # Pretend that the engine has only the LoRA modules that occur in the adapter. `placements` then
    # splits a fused layer if the conversion has split it.
    engine = replace(
        base,
        lora_target_modules=tuple({module for module, _ in rows}),
        tp_size=converted.tp_size or base.tp_size,
    )
    pairs: dict[str, Pair] = {}
    projections: dict[str, Projection] = {}
    for layer in sorted({layer for _, layer in rows}):
        for inside, projection in layout.projections.items():
            found = (
                None
                if projection.kind == "expert"
                else _take_layer(rows, layer, projection, engine)
            )
            if found is not None:
                path = f"{layout.layers}.{layer}.{inside}"
                pairs[path], projections[path] = found, projection
    if rows:
        unmatched = ", ".join(sorted({f"{module} of layer {layer}" for module, layer in rows}))
        allowed = "linear layers of " + base.architecture
        raise UnsupportedModule(_FILE, "modules", unmatched, allowed, _WHY)
    # Leave out layers of zeros. `adapters.plan` added these layers for the C++ runtime. When
    # TensorRT-LLM reads PEFT files, it adds missing layers itself.
    trained = {path: pair for path, pair in pairs.items() if pair[0].any() or pair[1].any()}
    written = trained or pairs
    fed = (placements(projections[path], engine) for path in written)
    return written, frozenset(module for places in fed for module, _ in places)


def _read_rows(converted: Converted, base: BaseModel) -> dict[tuple[str, int], Pair]:
    weights = np.frombuffer(converted.weights, "<u2").reshape(converted.rows, converted.width)
    rows: dict[tuple[str, int], Pair] = {}
    for row, (number, layer, rank) in zip(weights, converted.config_rows(), strict=True):
        inputs, outputs = module_sizes(MODULE_NAMES[number], base)
        a, b = rank * inputs, rank * outputs
        if a + b > converted.width or row[a + b :].any():
            field = f"{MODULE_NAMES[number]} of layer {layer}"
            raise ShapeMismatch(_FILE, field, f"{converted.width} values", f"{a + b} for this base")
        pair = row[:a].reshape(rank, inputs), row[a : a + b].reshape(outputs, rank)
        rows[MODULE_NAMES[number], layer] = pair
    return rows


def _take_layer(
    rows: dict[tuple[str, int], Pair], layer: int, projection: Projection, engine: BaseModel
) -> Pair | None:
    """Remove the rows of one linear layer from `rows`, and return them joined to one pair (A, B).

    Return None if a row is missing.
    """
    found = placements(projection, engine)
    row_keys = [(module, layer) for module, _ in found]
    if not row_keys or not all(place in rows for place in row_keys):
        return None
    pairs = [rows[place] for place in row_keys]
    a, b = pairs[0]
    if any(not np.array_equal(a, other) for other, _ in pairs[1:]):
        return None  # the rows have different A, so they are not from one fused layer
    for place in row_keys:
        del rows[place]
    if projection.kind == "plain":
        return a, b
    fused = np.empty((sum(b.shape[0] for _, b in pairs), a.shape[0]), np.uint16)
    for (_, part), (_, slices) in zip(pairs, found, strict=True):
        copied = 0
        for start, stop in slices:
            fused[start:stop] = part[copied : copied + stop - start]
            copied += stop - start
    return a, fused


def _pad(bits: Bits, shape: tuple[int, int]) -> Bits:
    if bits.shape == shape:
        return bits
    filled = np.zeros(shape, np.uint16)
    filled[: bits.shape[0], : bits.shape[1]] = bits
    return filled


def _build_header(tensors: Mapping[str, Bits], dtype: str) -> bytes:
    """Return a safetensors header, padded with spaces to a multiple of 8 bytes."""
    entries: dict[str, Any] = {}
    start = 0
    for name, bits in tensors.items():
        offsets = [start, start + bits.nbytes]
        entries[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": offsets}
        start += bits.nbytes
    text = json.dumps(entries).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(8, "little") + text
