"""Conversion of PEFT tensors to TensorRT-LLM's `lora_weights`.

The values of B are multiplied by the LoRA scale, and all values are rounded to the engine's data
type. The conversion needs memory for the complete result and for one PEFT tensor at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from adapters.adapter import (
    LAID_OUT_BY_TP,
    MODULE_IDS,
    Adapter,
    Converted,
    Dtype,
    TensorInfo,
    make_converted,
)
from adapters.base_model import BaseModel
from adapters.errors import CorruptFile, MissingFile, NotFinite
from adapters.peft import WEIGHTS, file_identity
from adapters.plan import LoraRow, plan

Floats = npt.NDArray[np.float32]

# Smallest magnitude that rounding turns into infinity, by data type. Each number lies half a
# rounding step above the largest finite value of the type.
_OVERFLOW = {"float16": 65520.0, "bfloat16": float.fromhex("0x1.ffp+127")}


def convert(adapter: Adapter, base: BaseModel) -> Converted:
    """Convert an adapter for this base model, in the model's data type.

    Raise a subclass of `AdapterError` if the adapter does not fit the model, if it has NaN or
    infinite values, or if its file has changed since it was validated.
    """
    rows = plan(adapter, base)
    try:
        with adapter.weights_file.open("rb") as file:
            if file_identity(os.fstat(file.fileno())) != adapter.identity:
                raise CorruptFile(WEIGHTS, "file", "changed while it was read", "the same file")
            return pack(rows, base, lambda name: _load(file, name, adapter.tensors[name]))
    except OSError as error:
        raise MissingFile(WEIGHTS, "file", error.strerror, "a readable file") from error


def pack(
    rows: Sequence[LoraRow], base: BaseModel, load: Callable[[str], Floats], file: str = WEIGHTS
) -> Converted:
    """Return an adapter that consists of `rows`, with the values that `load` returns.

    Args:
        rows: the rows to write, in order, as `adapters.plan` laid them out for `base`.
        load: returns a tensor by name, as a 2-D float32 array.
        file: name of the weights file, for errors.

    Raise `NotFinite` if a value is NaN or infinite, or if rounding to the data type of `base` makes
    a value infinite.
    """
    dtype = base.dtype
    width = max(row.length for row in rows)
    storage = np.dtype("<f2") if dtype == "float16" else np.dtype("<u2")
    buffer = np.zeros((len(rows), width), storage)
    for index, row in enumerate(rows):
        for piece in row.pieces:
            tensor = load(piece.tensor)
            position = piece.offset
            for start, stop in piece.slices:
                values = tensor[start:stop].reshape(-1)
                if piece.scale != 1.0:
                    with np.errstate(over="ignore"):
                        values = values * np.float32(piece.scale)
                _check_range(values, file, piece.tensor, dtype)
                end = position + values.size
                buffer[index, position:end] = _round_to_dtype(values, dtype)
                position = end
    config = [(MODULE_IDS[row.module], row.layer, row.rank) for row in rows]
    weights = buffer.reshape(-1).view(np.uint8).data.toreadonly()
    by_tp = any(row.module in LAID_OUT_BY_TP for row in rows)
    return make_converted(dtype, config, width, weights, base.tp_size if by_tp else None)


def to_float32(raw: npt.NDArray[Any], bfloat16: bool) -> Floats:
    """Convert float16, float32 or bfloat16 values to float32, without loss.

    bfloat16 values are passed as their bits, in uint16.
    """
    if bfloat16:
        return (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(np.float32, copy=False)


def _load(file: BinaryIO, name: str, tensor: TensorInfo) -> Floats:
    size = tensor.stop - tensor.start
    raw = os.pread(file.fileno(), size, tensor.start)
    if len(raw) != size:
        raise CorruptFile(WEIGHTS, name, f"{len(raw)} bytes", f"{size} bytes")
    storage = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[tensor.dtype]
    return to_float32(np.frombuffer(raw, storage).reshape(tensor.shape), tensor.dtype == "BF16")


def _check_range(values: Floats, file: str, name: str, dtype: Dtype) -> None:
    # Compute only the maximum and the minimum, so that the array is read only twice. If any value
    # is NaN, numpy returns NaN for both. If any value is infinite, one of the two is infinite.
    peak = float(np.maximum(values.max(), -values.min())) if values.size else 0.0
    if not np.isfinite(peak):
        raise NotFinite(file, name, peak, "finite values, also when scaled")
    if peak >= _OVERFLOW[dtype]:
        raise NotFinite(file, name, peak, f"below {_OVERFLOW[dtype]} when scaled", dtype)


def _round_to_dtype(values: Floats, dtype: Dtype) -> npt.NDArray[Any]:
    """Round values to the nearest value of `dtype`. Ties are rounded to even, as in IEEE 754.

    bfloat16 values are returned as their bits, in uint16.
    """
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
