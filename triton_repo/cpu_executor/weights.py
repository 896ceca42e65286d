"""Reading and merging safetensors files, bfloat16 included.

The format (huggingface/safetensors): 8 bytes little-endian header length, a JSON header
``{name: {"dtype", "shape", "data_offsets"}}``, then the raw little-endian tensors. It is
read and written here because safetensors' own numpy functions have no bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def bfloat16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """float32 of bfloat16 bit patterns: bfloat16 is the upper half of a float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _read_raw(path: Path) -> Iterator[tuple[str, str, NDArray[np.generic]]]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = entry["dtype"]
        if dtype not in _NUMPY_DTYPES:
            allowed = ", ".join(_NUMPY_DTYPES)
            raise ValueError(f"{path.name}: {name} has dtype {dtype}, allowed: {allowed}")
        start, end = entry["data_offsets"]
        yield name, dtype, data[start:end].view(_NUMPY_DTYPES[dtype]).reshape(entry["shape"])


def files(folder: Path) -> list[Path]:
    """The weight files of a model folder."""
    found = sorted(folder.glob("model*.safetensors"))
    if not found:
        raise FileNotFoundError(f"{folder}: no model*.safetensors file")
    return found


def load_float32(folder: Path) -> dict[str, NDArray[np.float32]]:
    """All tensors of a folder's ``model*.safetensors`` files as float32, by name."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for path in files(folder):
        for name, dtype, raw in _read_raw(path):
            if dtype == "BF16":
                tensors[name] = bfloat16_to_float32(raw.view(np.uint16))
            else:
                tensors[name] = raw.astype(np.float32)
    return tensors


def merge(folder: Path, destination: Path) -> None:
    """Write all tensors of a folder's shards into one file, bytes unchanged."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    tensors = []
    end = 0
    for path in files(folder):
        for name, dtype, raw in _read_raw(path):
            start, end = end, end + raw.nbytes
            header[name] = {"dtype": dtype, "shape": raw.shape, "data_offsets": [start, end]}
            tensors.append(raw)
    encoded = json.dumps(header).encode()
    # The format wants the data to start at a multiple of 8 bytes.
    encoded += b" " * (-len(encoded) % 8)
    with destination.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for raw in tensors:
            file.write(raw.tobytes())
