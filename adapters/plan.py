"""Layout of the rows of TensorRT-LLM's inputs `lora_config` and `lora_weights` for one adapter.

The layout states which part of a row gets which values of a PEFT tensor. This module does not read
the values. `adapters.convert` copies them according to the layout.

The format is that of TensorRT-LLM v0.17. Each module in each layer has one row. Rows are ordered by
layer, then by module id. A row has the values of A [rank, in], then the values of B [out, rank],
both row-major, then zeros up to the length of the longest row.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from adapters.adapter import ITEM_BYTES, MODULE_IDS, Adapter, LoraSettings
from adapters.base_model import BaseModel
from adapters.errors import (
    BaseMismatch,
    CorruptFile,
    IncompleteAdapter,
    InvalidRank,
    ShapeMismatch,
    TooLarge,
    UnsupportedEngine,
    UnsupportedFeature,
    UnsupportedModule,
)
from adapters.keys import LoraModule, read_modules
from adapters.modules import Projection, module_sizes
from adapters.patterns import ModulePattern
from adapters.peft import CONFIG, WEIGHTS

# Limit of the size of `lora_weights`. A gRPC message is limited to 2 GiB; 1 MiB is reserved for the
# other data of the request.
MAX_CONVERTED_BYTES = 2 * 1024**3 - 1024**2
_QKV = ("attn_q", "attn_k", "attn_v")
# Limit of the work for matching the keys of rank_pattern and alpha_pattern with the modules. The
# work is the number of characters of all keys, times the number of paths that the modules may have.
# For a large adapter with one key for each of its 441 modules, this product is 8 million.
_MAX_PATTERN_WORK = 40_000_000

Slices = tuple[tuple[int, int], ...]
Number = TypeVar("Number", int, float)
Patterns = tuple[tuple[ModulePattern, Number], ...]


@dataclass(frozen=True, slots=True)
class RowPiece:
    """Part of a `LoraRow` that is copied from one 2-D PEFT tensor.

    The part consists of the tensor's rows in the ranges `slices`, flattened and multiplied by
    `scale`. `offset` is the index of the part's first value in the `LoraRow`.
    """

    offset: int
    tensor: str
    slices: Slices
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class LoraRow:
    """Layout of one row of `lora_weights`. Values outside all `pieces` are zero.

    `length` is the number of values in the row without the padding at the row's end.
    """

    module: str
    layer: int
    rank: int
    length: int
    pieces: tuple[RowPiece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    """A and B of one linear layer. `keys` maps "A" and "B" to the names of the two tensors."""

    path: str
    keys: Mapping[str, str]
    inside: str
    layer: int
    expert: int | None
    projection: Projection
    rank: int
    scale: float


def plan(adapter: Adapter, base: BaseModel) -> list[LoraRow]:
    """Return the layout of all rows of an adapter for this base model, in order.

    Raise a subclass of `AdapterError` if the adapter does not fit the model.
    """
    named = adapter.settings.base_model_name_or_path
    if named is not None and not base.is_called(named):
        raise BaseMismatch(CONFIG, "base_model_name_or_path", named, ", ".join(base.names))
    rows: dict[tuple[int, str], LoraRow] = {}
    for pair in _pairs(adapter, base):
        _check_shapes(adapter, pair, base)
        for row in _rows(pair, base):
            place = (row.layer, row.module)
            rows[place] = _merge(rows.get(place), row, pair)
    return complete(rows.values(), base)


def complete(rows: Iterable[LoraRow], base: BaseModel) -> list[LoraRow]:
    """Add rows of zeros for missing q, k or v, sort all rows, and check the total size.

    The runtime requires that a layer has rows either for all of attn_q, attn_k and attn_v, or for
    none of them. Raise `TooLarge` if the rows do not fit into one gRPC message.
    """
    found = {(row.layer, row.module): row for row in rows}
    for layer in sorted({layer for layer, module in found if module in _QKV}):
        rank = max(found[layer, name].rank for name in _QKV if (layer, name) in found)
        for name in _QKV:
            if (layer, name) not in found and name in base.lora_target_modules:
                length = rank * sum(module_sizes(name, base))
                found[layer, name] = LoraRow(name, layer, rank, length)
    ordered = sorted(found.values(), key=lambda row: (row.layer, MODULE_IDS[row.module]))
    size = len(ordered) * max(row.length for row in ordered) * ITEM_BYTES
    if size > MAX_CONVERTED_BYTES:
        limit = f"{MAX_CONVERTED_BYTES} bytes"
        raise TooLarge(WEIGHTS, "lora_weights", f"{size} bytes", limit, "one gRPC message")
    return ordered


def _pairs(adapter: Adapter, base: BaseModel) -> Iterator[_Pair]:
    modules = read_modules(adapter.tensors, base)
    _check_pattern_work(adapter, modules.values())
    for path, found in modules.items():
        layer, expert, inside, projection = found.location
        if len(found.keys) == 1:
            missing = "B" if "A" in found.keys else "A"
            field = f"{path}.lora_{missing}.weight"
            raise IncompleteAdapter(WEIGHTS, field, "no tensor", "lora_A and lora_B together")
        rank, scale = _scaling(adapter.settings, path, found.spellings)
        yield _Pair(
            path=path,
            keys=found.keys,
            inside=inside,
            layer=layer,
            expert=expert,
            projection=projection,
            rank=rank,
            scale=scale,
        )


def _scaling(settings: LoraSettings, path: str, spellings: Collection[str]) -> tuple[int, float]:
    """Return the rank of a module, and the scale of the module's LoRA product.

    The first matching key of `rank_pattern` determines the rank, and the first matching key of
    `alpha_pattern` determines alpha. Without a matching key, the adapter's `r` and `lora_alpha`
    apply. The keys are compared with every path in `spellings`. Raise `UnsupportedFeature` if
    different paths yield different values.
    """

    def one(field: str, patterns: Patterns[Number], default: Number) -> Number:
        fitting = (
            next((value for pattern, value in patterns if pattern.matches(each)), None)
            for each in spellings
        )
        found = {value for value in fitting if value is not None}
        if len(found) > 1:
            raise UnsupportedFeature(
                CONFIG,
                f"{field} of {path}",
                f"{', '.join(map(str, sorted(found)))} for {', '.join(sorted(spellings))}",
                "one value",
                "the tensors' names do not say which of these paths the patterns mean",
            )
        return found.pop() if found else default

    rank = one("rank_pattern", settings.rank_pattern, settings.r)
    alpha = one("alpha_pattern", settings.alpha_pattern, settings.lora_alpha)
    return rank, settings.scale(alpha, rank)


def _check_pattern_work(adapter: Adapter, modules: Iterable[LoraModule]) -> None:
    patterns = (*adapter.settings.rank_pattern, *adapter.settings.alpha_pattern)
    characters = sum(len(pattern.key) for pattern, _ in patterns)
    count = sum(len(module.spellings) for module in modules)
    if characters * count > _MAX_PATTERN_WORK:
        found = f"{characters} characters for {count} modules"
        allowed = f"a product of up to {_MAX_PATTERN_WORK}"
        raise TooLarge(CONFIG, "rank_pattern and alpha_pattern", found, allowed)


def _check_shapes(adapter: Adapter, pair: _Pair, base: BaseModel) -> None:
    shapes = [adapter.tensors[pair.keys[side]].shape for side in "AB"]
    for side, shape in zip("AB", shapes, strict=True):
        if len(shape) != 2:
            raise ShapeMismatch(WEIGHTS, pair.keys[side], list(shape), "two dimensions")
    ranks = {shapes[0][0], shapes[1][1]}
    if ranks != {pair.rank}:
        why = "r and rank_pattern of adapter_config.json"
        raise InvalidRank(WEIGHTS, f"rank of {pair.path}", sorted(ranks), pair.rank, why)
    if pair.rank > base.max_lora_rank:
        allowed = f"1 .. {base.max_lora_rank}, the engine's max_lora_rank"
        raise InvalidRank(WEIGHTS, f"rank of {pair.path}", pair.rank, allowed)
    inputs, outputs = _linear_sizes(pair, base)
    if shapes[0][1] != inputs:
        expected = [pair.rank, inputs]
        raise ShapeMismatch(WEIGHTS, pair.keys["A"], list(shapes[0]), expected, "the base model")
    if shapes[1][0] != outputs:
        expected = [outputs, pair.rank]
        raise ShapeMismatch(WEIGHTS, pair.keys["B"], list(shapes[1]), expected, "the base model")


def _linear_sizes(pair: _Pair, base: BaseModel) -> tuple[int, int]:
    """Return (in, out) of the linear layer in the Hugging Face model."""
    inputs, outputs = module_sizes(pair.projection.module, base)
    if pair.projection.kind == "expert":
        return inputs // base.num_experts, outputs // base.num_experts
    if pair.projection.module == "attn_dense":
        return base.num_attention_heads * base.head_size, outputs
    return inputs, outputs


def _rows(pair: _Pair, base: BaseModel) -> Iterator[LoraRow]:
    if pair.expert is not None:
        yield _expert_row(pair, base)
        return
    found = placements(pair.projection, base)
    if not found:
        projection = pair.projection
        raise UnsupportedModule(
            WEIGHTS,
            f"module of {pair.path}",
            " or ".join(filter(None, [projection.module, " with ".join(projection.parts)])),
            ", ".join(base.lora_target_modules),
            "the engine's lora_target_modules",
        )
    for module, slices in found:
        inputs, outputs = module_sizes(module, base)
        b = pair.rank * inputs
        pieces = (
            RowPiece(0, pair.keys["A"], ((0, pair.rank),)),
            RowPiece(b, pair.keys["B"], slices, pair.scale),
        )
        yield LoraRow(module, pair.layer, pair.rank, pair.rank * (inputs + outputs), pieces)


def placements(projection: Projection, base: BaseModel) -> list[tuple[str, Slices]]:
    """Return (LoRA module, slices) for each LoRA module that a linear layer is converted to.

    The slices are the ranges of rows in the layer's B that belong to the LoRA module. The list is
    empty if the engine has no LoRA module for the layer. Raise the same errors as `check_runtime`.
    """
    targets = base.lora_target_modules
    if projection.module in targets:
        check_runtime(projection.module, base)
        if projection.kind == "plain":
            return [(projection.module, ((0, module_sizes(projection.module, base)[1]),))]
        return [(projection.module, _fused_slices(projection, base))]
    found: list[tuple[str, Slices]] = []
    if projection.parts and all(part in targets for part in projection.parts):
        start = 0
        for part in projection.parts:
            check_runtime(part, base)
            stop = start + module_sizes(part, base)[1]
            found.append((part, ((start, stop),)))
            start = stop
    return found


def _fused_slices(projection: Projection, base: BaseModel) -> Slices:
    """Return row ranges of a fused layer's LoRA matrix B, in the order that the engine needs.

    For gate_up, TensorRT-LLM needs the rows of up before the rows of gate. In Hugging Face's B, the
    rows of gate come first.

    With tensor parallelism, each GPU gets one contiguous part of the reordered rows. A GPU needs
    its share of q, of k and of v (or of up and of gate), so these ranges are adjacent in the
    result. TensorRT-LLM does the same in `interleave_fused_lora_weights_for_tp` of lora_manager.py.
    """
    bounds: list[tuple[int, int]] = []
    start = 0
    for part in projection.parts:
        stop = start + module_sizes(part, base)[1]
        bounds.append((start, stop))
        start = stop
    if projection.kind == "fused_gate_up":
        bounds.reverse()
    if base.tp_size == 1:
        return tuple(bounds) if projection.kind == "fused_gate_up" else ((0, start),)
    shares = [(begin, (end - begin) // base.tp_size) for begin, end in bounds]
    return tuple(
        (begin + rank * share, begin + (rank + 1) * share)
        for rank in range(base.tp_size)
        for begin, share in shares
    )


def check_runtime(module: str, base: BaseModel) -> None:
    """Raise an error if TensorRT-LLM's C++ runtime would read a module's values at wrong offsets.

    The error is `UnsupportedModule` or `UnsupportedEngine`.
    """
    attention = base.num_attention_heads * base.head_size
    if module == "attn_dense" and attention != base.hidden_size:
        raise UnsupportedModule(
            WEIGHTS,
            "attn_dense input",
            f"{attention} (heads x head_size)",
            f"{base.hidden_size} (hidden_size)",
            "TensorRT-LLM's runtime sizes attn_dense as hidden to hidden (its PR 17153)",
        )
    if module in ("attn_k", "attn_v", "attn_qkv") and base.num_key_value_heads % base.tp_size:
        raise UnsupportedEngine(
            "config.json",
            f"tp_size for {module}",
            base.tp_size,
            f"a divisor of {base.num_key_value_heads} key and value heads",
        )


def _expert_row(pair: _Pair, base: BaseModel) -> LoraRow:
    """Return the row of a LoRA module with the values of one expert.

    The row has the A matrices of all experts, [experts, rank, in], and then their B matrices,
    [experts, out, rank]. The values of the other experts are zero.
    """
    module = pair.projection.module
    if module not in base.lora_target_modules:
        targets = ", ".join(base.lora_target_modules)
        why = "the engine's lora_target_modules"
        raise UnsupportedModule(WEIGHTS, f"module of {pair.path}", module, targets, why)
    if base.tp_size > 1:
        why = "the runtime splits expert weights as if they were one matrix"
        raise UnsupportedEngine("config.json", f"tp_size for {module}", base.tp_size, 1, why)
    assert pair.expert is not None
    inputs, outputs = _linear_sizes(pair, base)
    a = pair.expert * pair.rank * inputs
    b = pair.rank * (base.num_experts * inputs + pair.expert * outputs)
    pieces = (
        RowPiece(a, pair.keys["A"], ((0, pair.rank),)),
        RowPiece(b, pair.keys["B"], ((0, outputs),), pair.scale),
    )
    length = base.num_experts * pair.rank * (inputs + outputs)
    return LoraRow(module, pair.layer, pair.rank, length, pieces)


def _merge(known: LoraRow | None, row: LoraRow, pair: _Pair) -> LoraRow:
    """Return a row that combines `row`, which has one expert's values, with `known`.

    All experts of a layer share one row for each LoRA module. `known` is this row with the values
    of the experts that were added before; None if there were none. Raise `InvalidRank` if the two
    LoRA ranks differ. Raise `CorruptFile` if a row already exists for a linear layer that is not an
    expert.
    """
    if known is None:
        return row
    if pair.expert is None:
        why = f"another layer of it is converted to {row.module} of layer {row.layer} already"
        raise CorruptFile(WEIGHTS, "module", pair.path, "one linear layer for each row", why)
    if known.rank != row.rank:
        field = f"rank of {pair.path}"
        why = "all experts of a layer share one row"
        raise InvalidRank(WEIGHTS, field, row.rank, known.rank, why)
    return LoraRow(row.module, row.layer, row.rank, row.length, known.pieces + row.pieces)
