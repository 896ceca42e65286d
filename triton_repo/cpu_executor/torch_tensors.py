"""Logits in TensorRT-LLM's form: torch tensors, or a stand-in if torch is not loaded.

The stand-in has exactly what the `model.py` of tensorrtllm_backend v0.12 to v0.19 uses. Of a
tensor: `dtype`, `shape`, indexing, `squeeze(dim)`, `tolist` and `numpy.array(tensor, dtype)`. Of
torch: its dtypes, `Tensor`, `from_numpy`, `unsqueeze`, and `from_dlpack` and `to_dlpack` of
`utils.dlpack`.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Tensor(np.ndarray[Any, Any]):
    """A numpy array that also acts as a CPU tensor of torch.

    Its dtypes are numpy's, of which one object each exists: `tensor.dtype is torch.float32` is True
    with the `torch` made of `TORCH`.
    """

    def squeeze(self, dim: int | None = None) -> Tensor:  # type: ignore[override]
        """Remove dimension `dim` if it has one element; without `dim` all such dimensions."""
        keeps = dim is not None and self.shape[dim] != 1
        return self if keeps else np.squeeze(self.view(np.ndarray), dim).view(Tensor)


def as_torch(array: NDArray[np.float32]) -> Any:
    """Return the array as a torch tensor, or as its stand-in without torch; memory is shared."""
    torch = sys.modules.get("torch")
    return from_numpy(array) if torch is None else torch.from_numpy(array)


def from_numpy(array: NDArray[Any]) -> Tensor:
    return array.view(Tensor)


def unsqueeze(tensor: Tensor, dim: int) -> Tensor:
    return np.expand_dims(tensor, dim).view(Tensor)


def from_dlpack(capsule: Any) -> Tensor:
    """Return a tensor in host memory from the capsule of Triton's `to_dlpack`."""
    return np.from_dlpack(_Capsule(capsule)).view(Tensor)


def to_dlpack(tensor: NDArray[Any]) -> Any:
    """Return a capsule for `from_dlpack` of Triton's tensors, which shares the memory.

    The capsule must be consumed: the memory is retained until then. numpy makes no capsule of
    read-only memory, such as a request's, so that is copied.
    """
    array = np.asarray(tensor)
    capsule = (array if array.flags.writeable else array.copy()).__dlpack__()
    # Triton (2.51) renames a capsule that it takes to a name that numpy's destructor does not know,
    # which would end the process. The consumer frees the memory, so the capsule needs no
    # destructor.
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
# numpy has neither of the last two: these dtypes never occur in an array here.
TORCH: dict[str, Any] = {
    **{name: np.dtype(name) for name in _COMMON},
    "bfloat16": np.dtype([("bfloat16", np.uint16)]),
    "complex32": np.dtype([("complex32", np.uint32)]),
    "Tensor": Tensor,
    "from_numpy": from_numpy,
    "unsqueeze": unsqueeze,
}
