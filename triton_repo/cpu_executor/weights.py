"""Reader of a model's safetensors files, which can also merge them into one file.

This module does not use the safetensors package, because its numpy functions do not support
bfloat16. `adapters.safetensors` reads the headers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters.adapter import TensorInfo
from adapters.convert import to_float32
from adapters.errors import AdapterError
from adapters.model_files import find_weights, weight_problems
from adapters.safetensors import read_header

_NUMPY_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def _read_raw(path: Path) -> Iterator[tuple[str, TensorInfo, NDArray[np.generic]]]:
    with path.open("rb") as file:
        try:
            tensors = read_header(file, path.name, path.stat().st_size)
        except AdapterError as error:  # raise ValueError, because the file is no adapter
            raise ValueError(str(error)) from error
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for name, info in tensors.items():
        raw = data[info.start : info.stop].view(_NUMPY_DTYPES[info.dtype])
        yield name, info, raw.reshape(info.shape)


def files(folder: Path) -> list[Path]:
    """Return the weight files of a model folder. Raises ValueError for missing or invalid files."""
    if problems := weight_problems(folder):
        raise ValueError("\n".join(map(str, problems)))
    return find_weights(folder)


def load_float32(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Return all tensors of a folder's ``model*.safetensors`` files as float32, by name."""
    tensors: dict[str, NDArray[np.float32]] = {}
    for path in files(folder):
        for name, info, raw in _read_raw(path):
            bfloat16 = info.dtype == "BF16"
            # Copy always: a view would keep the file mapped, and the values may be unaligned.
            tensors[name] = to_float32(raw, bfloat16=True) if bfloat16 else raw.astype(np.float32)
    return tensors


def merge(folder: Path, destination: Path) -> None:
    """Write the tensors of all weight files in a folder, unchanged, into one safetensors file."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    tensors = []
    end = 0
    for path in files(folder):
        for name, info, raw in _read_raw(path):
            start, end = end, end + raw.nbytes
            header[name] = {"dtype": info.dtype, "shape": raw.shape, "data_offsets": [start, end]}
            tensors.append(raw)
    encoded = json.dumps(header).encode()
    # Pad the header: the format requires the tensor data to start at a multiple of 8 bytes.
    encoded += b" " * (-len(encoded) % 8)
    with destination.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for raw in tensors:
            file.write(raw.tobytes())
