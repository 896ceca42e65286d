"""Triton's number formats as numpy type strings. This module does not import numpy itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FLOATS: Mapping[str, str] = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8", "BF16": "<u2"}
NUMBERS: Mapping[str, str] = {
    "BOOL": "?",
    "INT32": "<i4",
    "INT64": "<i8",
    "UINT8": "u1",
    "UINT32": "<u4",
    "UINT64": "<u8",
    **FLOATS,
}


def float32(values: npt.NDArray[Any], datatype: str) -> npt.NDArray[np.float32]:
    """Convert the numbers of a tensor to float32.

    `values` must have the numpy type that `FLOATS` gives for `datatype`. BF16 numbers are therefore
    uint16, because numpy has no BF16 type. A BF16 number is the upper half of an FP32 number.
    """
    if datatype == "BF16":
        return (values.astype("<u4") << 16).view("<f4")
    return values.astype("<f4", copy=False)
