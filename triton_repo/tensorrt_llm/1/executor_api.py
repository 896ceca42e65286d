"""Import of the executor API, and conversion between Triton's and the executor's tensors.

The name `trtllm` stands for the module `tensorrt_llm.bindings.executor`. If TensorRT-LLM is not
installed, it stands for the CPU executor's module with the same classes.
"""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

CPU_EXECUTOR = "triton_repo.cpu_executor.bindings"

try:
    import tensorrt_llm.bindings.executor as trtllm
    import torch

    if trtllm.__name__ == CPU_EXECUTOR:
        # The CPU executor is installed under the name tensorrt_llm. In this case, do not use torch:
        # it may be the CPU executor's replacement, which has only the names that upstream uses.
        torch = None
except ModuleNotFoundError as missing:
    # Use the CPU executor only if TensorRT-LLM is not installed. If an installed TensorRT-LLM fails
    # to load, raise its error.
    if missing.name != "tensorrt_llm":
        raise
    from triton_repo.cpu_executor import bindings as trtllm

    torch = None

# The names of the three Triton inputs that set the arguments of LookaheadDecodingConfig, in the
# order of the arguments. The model parameters that set the defaults have the same names.
LOOKAHEAD = (
    "lookahead_window_size",
    "lookahead_ngram_size",
    "lookahead_verification_set_size",
)

__all__ = ["LOOKAHEAD", "RequestRow", "drop_unset", "tokenizer_info", "triton_tensor", "trtllm"]


class RequestRow:
    """A row of a Triton request: its input tensors at one index of the batch dimension."""

    def __init__(self, tensors: dict[str, Any], index: int) -> None:
        self._tensors = tensors
        self._index = index

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def array(self, name: str) -> npt.NDArray[Any] | None:
        if name not in self._tensors:
            return None
        row: npt.NDArray[Any] = np.asarray(self._tensors[name].as_numpy()[self._index])
        # Treat an empty row as missing: an ensemble passes an empty tensor for an input that the
        # client omitted.
        return row if row.size else None

    def ids(self, name: str) -> list[int] | None:
        array = self.array(name)
        return None if array is None else array.tolist()

    def scalar(self, name: str) -> Any:
        array = self.array(name)
        if array is None:
            return None
        if array.size != 1:
            raise ValueError(f"Expected a scalar tensor for tensor {name}")
        return array.item()

    def text(self, name: str) -> str | None:
        value: bytes | None = self.scalar(name)
        return None if value is None else value.decode()

    def require(self, name: str) -> Any:
        value = self.scalar(name)
        if value is None:
            raise ValueError(f"A value is required for {name}")
        return value

    def engine_tensor(self, name: str) -> Any:
        """Return one input of the row as a tensor of the executor's type.

        Return None if the input is missing or empty. TensorRT-LLM needs a torch tensor, and the CPU
        executor needs a numpy array. numpy has no BF16, so a BF16 input is returned as its bits, in
        uint16.
        """
        if name not in self._tensors:
            return None
        if torch is None:
            bits = np.from_dlpack(_Bits(self._tensors[name]))[self._index]
            return bits if bits.size else None
        row = torch.from_dlpack(self._tensors[name].to_dlpack())[self._index]
        return row if row.numel() else None


class _Head(ctypes.Structure):
    """The first fields of a DLManagedTensor (dlpack.h), up to the type code of the elements."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
    )


class _Bits:
    """Wrapper of a Triton tensor for numpy's `from_dlpack`, which presents BF16 as uint16."""

    UINT, BFLOAT = 1, 4

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> Any:
        return self._tensor.__dlpack_device__()

    def __dlpack__(self, **_: Any) -> Any:
        capsule = self._tensor.to_dlpack()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.argtypes, pointer.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p
        head = _Head.from_address(pointer(capsule, b"dltensor"))
        if head.code == self.BFLOAT:
            head.code = self.UINT
        return capsule


def triton_tensor(name: str, tensor: Any) -> Any:
    """Return an executor's tensor as a Triton tensor, with a leading batch dimension of 1."""
    if torch is None:
        return pb_utils.Tensor(name, np.asarray(tensor)[None])
    return pb_utils.Tensor.from_dlpack(name, tensor[None].contiguous())


def tokenizer_info(folder: str) -> dict[str, Any]:
    """Return the keyword arguments of `GuidedDecodingConfig` for the tokenizer in `folder`."""
    # Import here: these modules take a second to load, and only this function needs them.
    if torch is None:
        from triton_repo.cpu_executor.tokenizer_info import FastTokenizer, xgrammar_tokenizer_info  # noqa: PLC0415

        return xgrammar_tokenizer_info(FastTokenizer(Path(folder)))
    from tensorrt_llm.llmapi.tokenizer import _xgrammar_tokenizer_info  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    info: dict[str, Any] = _xgrammar_tokenizer_info(AutoTokenizer.from_pretrained(folder))
    return info


def drop_unset(**values: Any) -> dict[str, Any]:
    """Return the keyword arguments that are not None.

    A function that is called with the result uses its own defaults for the dropped arguments.
    """
    return {name: value for name, value in values.items() if value is not None}
