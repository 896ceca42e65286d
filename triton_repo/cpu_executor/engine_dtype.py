"""Check of the dtype of LoRA weights and prompt tables, and their conversion to float32.

Both must have the engine's dtype.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from adapters import convert
from triton_repo.cpu_executor.engine import CpuEngineConfig

_ALLOWED = {
    "float16": ("float16",),
    "float32": ("float32",),
    # Accept bfloat16 bits as uint16 or as two raw bytes, because numpy has no bfloat16.
    "bfloat16": ("uint16", "|V2"),
}


def has_engine_dtype(config: CpuEngineConfig, tensor: NDArray[Any]) -> bool:
    return tensor.dtype in [np.dtype(name) for name in _ALLOWED[config.dtype]]


def to_float32(config: CpuEngineConfig, tensor: NDArray[Any]) -> NDArray[np.float32]:
    """Convert a tensor from the engine's dtype to float32."""
    if config.dtype == "bfloat16":
        return convert.to_float32(tensor.view(np.uint16), bfloat16=True)
    return tensor.astype(np.float32)
