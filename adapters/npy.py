"""Reader and writer of the files of TensorRT-LLM's hf_lora_convert.py.

The files are ``model.lora_weights.npy`` and ``model.lora_config.npy`` (older:
``model.lora_keys.npy``). These files do not state the shapes of the base model. An import detects
an adapter of another base model by the lengths of the rows: the longest row must have exactly the
length that it has for this base model, and shorter rows must be padded with zeros.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib import format as _format

from adapters.adapter import MODULE_NAMES, Converted
from adapters.base_model import BaseModel
from adapters.convert import Floats, pack, to_float32
from adapters.errors import (
    CorruptFile,
    IncompleteAdapter,
    InvalidRank,
    LayerOutOfRange,
    MissingFile,
    ShapeMismatch,
    TooLarge,
    UnsupportedFeature,
    UnsupportedModule,
)
from adapters.file_kinds import HEAD_BYTES, kind_of
from adapters.modules import module_sizes
from adapters.npy_files import CONFIG, OLD_CONFIG, WEIGHTS
from adapters.peft import MAX_ADAPTER_BYTES, resolve_file
from adapters.plan import LoraRow, RowPiece, check_runtime, complete
from adapters.safetensors import MAX_DIMENSIONS, MAX_SIZE

# Data type of bfloat16 values in the converter's files: 2-byte void, because numpy has no bfloat16.
_BFLOAT16 = np.dtype("V2")
_DTYPES = (np.dtype("<f2"), np.dtype("<f4"), _BFLOAT16, np.dtype("<i4"))
# Limit of the header in bytes. The converter's headers have 118 bytes. Without the limit, a long
# malicious header could block the process. A header of this size takes only milliseconds to parse.
_MAX_HEADER = 10_000
_NPY: Any = _format  # Any, because the module's functions have no annotations
_HEADERS: Mapping[tuple[int, int], Any] = {
    (1, 0): _NPY.read_array_header_1_0,
    (2, 0): _NPY.read_array_header_2_0,
}


def read(
    folder: Path,
    base: BaseModel,
    *,
    within: Path | None = None,
    max_bytes: int = MAX_ADAPTER_BYTES,
) -> Converted:
    """Read the adapter in `folder`. Return it in the base model's data type, rounded if necessary.

    The returned rows have the order that `adapters.plan` describes. In the files, the values of B
    must already be multiplied by the LoRA scale: TensorRT-LLM's converter does this. The rows of
    fused layers must have the layout for the `tp_size` of `base`. This is not verified, because the
    files do not state the size. The keyword arguments and errors are those of `adapters.peft.read`.
    """
    name = CONFIG if (folder / CONFIG).exists() else OLD_CONFIG
    config = _config(_open(folder, name, within, max_bytes), name)
    weights = _open(folder, WEIGHTS, within, max_bytes)
    if weights.dtype not in (np.float16, np.float32, _BFLOAT16):
        allowed = "float16, float32, or bfloat16 as 2-byte void"
        raise UnsupportedFeature(WEIGHTS, "dtype", str(weights.dtype), allowed)
    if weights.ndim != 3 or weights.shape[:2] != (1, len(config)):
        allowed = f"[1, {len(config)}, width], one row for each of {name}"
        raise ShapeMismatch(WEIGHTS, "shape", list(weights.shape), allowed)
    rows = [_row(index, entry, weights, base) for index, entry in enumerate(config.tolist())]
    _check_distinct(rows)
    longest = max(row.length for row in rows)
    if longest != weights.shape[2]:
        allowed = f"{longest}, the longest row for this base model"
        raise ShapeMismatch(WEIGHTS, "width", weights.shape[2], allowed)

    def load(index: str) -> Floats:
        values = weights[0, int(index), : rows[int(index)].length]
        bfloat16 = weights.dtype == _BFLOAT16
        return to_float32(values.view("<u2") if bfloat16 else values, bfloat16).reshape(1, -1)

    return pack(complete(rows, base), base, load, WEIGHTS)


def write(converted: Converted, folder: Path) -> None:
    """Write an adapter as the converter's two files, with bfloat16 as 2-byte void."""
    shape = (1, converted.rows, converted.width)
    storage: Any = "<f2" if converted.dtype == "float16" else _BFLOAT16
    np.save(folder / WEIGHTS, np.frombuffer(converted.weights, storage).reshape(shape))
    config = np.frombuffer(converted.config, "<i4").reshape(1, converted.rows, 3)
    np.save(folder / CONFIG, config)


def _open(folder: Path, name: str, within: Path | None, limit: int) -> npt.NDArray[Any]:
    path = resolve_file(folder, name, within)
    try:
        size = path.stat().st_size
        if size > limit:
            raise TooLarge(name, "size", f"{size} bytes", f"{limit} bytes")
        return _parse(path.read_bytes(), name)
    except OSError as error:
        raise MissingFile(name, "file", error.strerror, "a readable file") from error


def _parse(raw: bytes, name: str) -> npt.NDArray[Any]:
    """Return the array in an .npy file (format 1.0 or 2.0), as a view of `raw`.

    Pickles are refused.
    """
    # Pass at most `_MAX_HEADER` bytes to numpy. Before numpy checks its own limit, it reads as many
    # bytes as the file states for the header.
    if (kind := kind_of(raw[:HEAD_BYTES])) is not None:
        raise CorruptFile(name, "header", kind.name, ".npy", says=kind.words)
    file = io.BytesIO(raw[:_MAX_HEADER])
    try:
        read_header = _HEADERS[_NPY.read_magic(file)]
        shape, fortran_order, dtype = read_header(file, max_header_size=_MAX_HEADER)
    # Catch all exceptions: for a malicious file, Python's parser and numpy can raise any type.
    except Exception as error:
        raise CorruptFile(name, "header", raw[:80], "that of an .npy file, 1.0 or 2.0") from error
    if dtype not in _DTYPES:
        raise UnsupportedFeature(name, "dtype", str(dtype), ", ".join(map(str, _DTYPES)))
    if fortran_order:
        raise UnsupportedFeature(name, "fortran_order", fortran_order, False)
    if len(shape) > MAX_DIMENSIONS or not all(0 <= size < MAX_SIZE for size in shape):
        raise CorruptFile(name, "shape", shape, "a tuple of integers")
    start = file.tell()
    expected = start + math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        raise CorruptFile(name, "size", f"{len(raw)} bytes", f"{expected} bytes by the header")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape)


def _config(array: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    """Check the configuration, and return it as int32 [rows, 3].

    Newer releases of TensorRT-LLM append a column with a DoRA flag, which must be 0 here.
    """
    if array.dtype != np.int32:
        raise UnsupportedFeature(name, "dtype", str(array.dtype), "int32")
    if array.ndim != 3 or array.shape[0] != 1 or array.shape[2] not in (3, 4):
        raise ShapeMismatch(name, "shape", list(array.shape), "[1, rows, 3] or [1, rows, 4]")
    if array.shape[1] == 0:
        raise IncompleteAdapter(name, "rows", 0, "at least one row")
    if array.shape[2] == 4 and array[0, :, 3].any():
        raise UnsupportedFeature(name, "is_dora", 1, 0, "DoRA")
    return array[0, :, :3]


def _row(index: int, entry: list[int], weights: npt.NDArray[Any], base: BaseModel) -> LoraRow:
    number, layer, rank = entry
    module = MODULE_NAMES.get(number)
    if module is None or module not in base.lora_target_modules:
        found = module or f"module id {number}"
        targets = ", ".join(base.lora_target_modules)
        why = "the engine's lora_target_modules"
        raise UnsupportedModule(CONFIG, f"module of row {index}", found, targets, why)
    if not 0 <= layer < base.num_hidden_layers:
        allowed = f"0 .. {base.num_hidden_layers - 1}"
        raise LayerOutOfRange(CONFIG, f"layer of row {index}", layer, allowed)
    if not 1 <= rank <= base.max_lora_rank:
        allowed = f"1 .. {base.max_lora_rank}, the engine's max_lora_rank"
        raise InvalidRank(CONFIG, f"rank of row {index}", rank, allowed)
    check_runtime(module, base)
    length = rank * sum(module_sizes(module, base))
    field = f"row {index} ({module}, layer {layer}, rank {rank})"
    if length > weights.shape[2]:
        raise ShapeMismatch(WEIGHTS, field, f"{weights.shape[2]} values", f"{length} values")
    if weights[0, index, length:].view(np.uint8).any():
        allowed = f"zeros after {length} values for this base model"
        raise ShapeMismatch(WEIGHTS, field, "further values", allowed)
    return LoraRow(module, layer, rank, length, (RowPiece(0, str(index), ((0, 1),)),))


def _check_distinct(rows: list[LoraRow]) -> None:
    seen: set[tuple[str, int]] = set()
    for row in rows:
        if (row.module, row.layer) in seen:
            field = f"{row.module} of layer {row.layer}"
            raise CorruptFile(CONFIG, field, "two rows", "one row")
        seen.add((row.module, row.layer))
