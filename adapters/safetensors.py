"""Reader and validator of the header of a safetensors file.

Format (huggingface/safetensors): u64 little-endian header length, a JSON object of name -> {dtype,
shape, data_offsets}, then the data without gaps. This module does not import numpy.
"""

from __future__ import annotations

import json
import math
from typing import Any, BinaryIO, TypeGuard

from adapters.adapter import TensorInfo
from adapters.errors import CorruptFile, UnsupportedFeature
from adapters.file_kinds import HEAD_BYTES, kind_of

_MAX_HEADER = 16 * 1024 * 1024
# Limit of the number of brackets, commas and quotes in a header. It suffices for 100,000 tensors.
# Without the limit, a header of 16 MiB could be parsed to half a gigabyte of empty objects.
_MAX_PARTS = 2_500_000
MAX_DIMENSIONS = 8
MAX_SIZE = 2**63
"""Limit of each dimension and offset in a header. No file is as large as this number of bytes.

Without the limit, a header with very long numbers could make their multiplication take minutes.
"""
_MAX_DIGITS = 20
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def read_header(file: BinaryIO, name: str, size: int) -> dict[str, TensorInfo]:
    """Return all tensors in the file, by name.

    `size` is the file's size in bytes. `name` is the file's name in error messages. Raise
    `CorruptFile` if lengths, offsets or shapes contradict each other or the file's size. Raise
    `UnsupportedFeature` for a data type other than F32, F16 and BF16.
    """
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    limit = min(size - 8, _MAX_HEADER)
    if len(prefix) < 8 or not 2 <= length <= limit:
        head = prefix + file.read(HEAD_BYTES - len(prefix))
        raise CorruptFile(
            name, "header length", length, f"2 .. {limit}", says=_describe_bad_head(head, size)
        )
    raw = file.read(length)
    parts = sum(map(raw.count, (b"{", b"[", b",", b'"')))
    if parts > _MAX_PARTS:
        raise CorruptFile(name, "header", f"{parts} brackets, commas and quotes", _MAX_PARTS)
    try:
        header = json.loads(raw, object_pairs_hook=_reject_duplicates, parse_int=_parse_int)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(name, "header", error, "a JSON object with distinct names") from error
    if not isinstance(header, dict):
        raise CorruptFile(name, "header", type(header).__name__, "a JSON object")
    header.pop("__metadata__", None)
    tensors = {
        tensor: _parse_tensor(name, tensor, entry, 8 + length) for tensor, entry in header.items()
    }
    _check_coverage(name, tensors, 8 + length, size)
    return tensors


def _describe_bad_head(head: bytes, size: int) -> str:
    """Return the problem of a file that is not a safetensors file, as the end of a sentence.

    `head` has the first bytes of the file.
    """
    if not head:
        return "is empty; save or download it again"
    if (kind := kind_of(head)) is not None:
        return f"is {kind.name}, and no safetensors file; {kind.fix}"
    return (
        f"is no safetensors file, or was cut: it has {size} bytes, and its first 8 give no length "
        "of a header in it; save or download it again"
    )


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        raise ValueError("a name occurs twice")
    return names


def _parse_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError("a number is too long")
    return int(digits)


def _is_int_list(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= MAX_DIMENSIONS
        and all(type(item) is int and 0 <= item < MAX_SIZE for item in value)
    )


def _parse_tensor(file: str, name: str, entry: Any, data: int) -> TensorInfo:
    if not isinstance(entry, dict):
        raise CorruptFile(file, name, entry, "an object with dtype, shape and data_offsets")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not _is_int_list(shape):
        raise CorruptFile(file, f"{name} shape", shape, "a list of integers")
    if not _is_int_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CorruptFile(file, f"{name} data_offsets", offsets, "[begin, end], begin <= end")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise UnsupportedFeature(file, f"{name} dtype", dtype, ", ".join(ITEM_BYTES))
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != expected:
        raise CorruptFile(file, f"{name} data_offsets", offsets, f"{expected} bytes for {shape}")
    return TensorInfo(dtype, tuple(shape), data + offsets[0], data + offsets[1])


def _check_coverage(file: str, tensors: dict[str, TensorInfo], data: int, size: int) -> None:
    position = data
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != position:
            raise CorruptFile(
                file, f"{name} data_offsets", tensor.start, f"{position}: no holes, no overlaps"
            )
        position = tensor.stop
    if position != size:
        says = f"has {size} bytes, and {position} by its header; save or download it again"
        raise CorruptFile(file, "size", size, position, says=says)
