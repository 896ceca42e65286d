"""Conversion of logits to torch tensors, and a minimal replacement for torch where it is missing.

The replacement has exactly the names that `model.py` of tensorrtllm_backend v0.12 to v0.19 uses.
Tensors have `dtype`, `shape`, indexing, `squeeze(dim)`, `tolist` and conversion by
`numpy.array(tensor, dtype)`. The module has torch's dtypes, `Tensor`, `from_numpy`, `unsqueeze`,
and `from_dlpack` and `to_dlpack` in `utils.dlpack`.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Tensor(np.ndarray[Any, Any]):
    """A numpy array that can be used as a CPU tensor of torch.

    numpy has a single object for each built-in dtype. The mapping `TORCH`, from which a replacement
    of the module `torch` is built, has the same objects. For a float32 tensor, the expression
    `tensor.dtype is torch.float32` is therefore True.
    """

    def squeeze(self, dim: int | None = None) -> Tensor:  # type: ignore[override]
        """Return a tensor without dimension `dim` if this dimension has size 1.

        If `dim` is None, all dimensions of size 1 are removed.
        """
        keeps = dim is not None and self.shape[dim] != 1
        return self if keeps else np.squeeze(self.view(np.ndarray), dim).view(Tensor)


def as_torch(array: NDArray[np.float32]) -> Any:
    """Return the array as a torch tensor, or as a `Tensor` if torch is not loaded.

    The result shares the array's memory.
    """
    torch = sys.modules.get("torch")
    return from_numpy(array) if torch is None else torch.from_numpy(array)


def from_numpy(array: NDArray[Any]) -> Tensor:
    return array.view(Tensor)


def unsqueeze(tensor: Tensor, dim: int) -> Tensor:
    return np.expand_dims(tensor, dim).view(Tensor)


def from_dlpack(capsule: Any) -> Tensor:
    """Return the tensor in a capsule from Triton's `to_dlpack`.

    The tensor must be in host memory, not on a GPU.
    """
    return np.from_dlpack(_Capsule(capsule)).view(Tensor)


def to_dlpack(tensor: NDArray[Any]) -> Any:
    """Return a capsule for Triton's `Tensor.from_dlpack`, which shares the tensor's memory.

    The capsule must be passed to `from_dlpack`, because only the consumer frees the memory. numpy
    exports no capsules of read-only arrays, such as the inputs of a request. Such an array is
    copied first.
    """
    array = np.asarray(tensor)
    capsule = (array if array.flags.writeable else array.copy()).__dlpack__()
    # Remove numpy's destructor of the capsule. Triton (2.51) renames a capsule when it consumes the
    # tensor, and numpy's destructor ends the process if it does not know the name. The memory is
    # still freed, because the consumer frees it.
    _set_destructor(capsule, None)
    return capsule


_set_destructor = ctypes.pythonapi.PyCapsule_SetDestructor
_set_destructor.argtypes = (ctypes.py_object, ctypes.c_void_p)


class _Capsule:
    HOST = (1, 0)

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.HOST

    def __dlpack__(self, **_: Any) -> Any:
        return self._capsule


_COMMON = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
# Placeholders for bfloat16 and complex32, which numpy lacks. No array has such a dtype.
TORCH: dict[str, Any] = {
    **{name: np.dtype(name) for name in _COMMON},
    "bfloat16": np.dtype([("bfloat16", np.uint16)]),
    "complex32": np.dtype([("complex32", np.uint32)]),
    "Tensor": Tensor,
    "from_numpy": from_numpy,
    "unsqueeze": unsqueeze,
}
