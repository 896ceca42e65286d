"""The executor that this host has, and the one place where its tensors are converted."""

from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

try:
    import tensorrt_llm.bindings.executor as trtllm
    import torch
except ModuleNotFoundError as missing:
    # A TensorRT-LLM that is there but does not load must not turn into the CPU executor.
    if missing.name != "tensorrt_llm":
        raise
    from triton_repo.executor import bindings as trtllm

    torch = None

__all__ = ["Row", "given", "tokenizer_info", "triton_tensor", "trtllm"]


class Row:
    """One row of a request's batch: its input tensors without the batch dimension."""

    def __init__(self, tensors: dict[str, Any], index: int) -> None:
        self._tensors = tensors
        self._index = index

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def array(self, name: str) -> npt.NDArray[Any] | None:
        if name not in self._tensors:
            return None
        row: npt.NDArray[Any] = np.asarray(self._tensors[name].as_numpy()[self._index])
        # An ensemble passes an empty row for what its client left out.
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

    def required(self, name: str) -> Any:
        value = self.scalar(name)
        if value is None:
            raise ValueError(f"A value is required for {name}")
        return value

    def engine_tensor(self, name: str) -> Any:
        """The row as the executor takes it: a torch tensor for TensorRT-LLM, else numpy."""
        if torch is None or name not in self._tensors:
            return self.array(name)
        # DLPack also carries BF16, which numpy does not have.
        row = torch.from_dlpack(self._tensors[name].to_dlpack())[self._index]
        return row if row.numel() else None


def triton_tensor(name: str, tensor: Any) -> Any:
    """A batch of one from an executor's tensor: the other side of `Row.engine_tensor`."""
    if torch is None:
        return pb_utils.Tensor(name, np.asarray(tensor)[None])
    return pb_utils.Tensor.from_dlpack(name, tensor[None].contiguous())


def tokenizer_info(folder: str) -> dict[str, Any]:
    """What `GuidedDecodingConfig` needs to know about the tokenizer in `folder`."""
    # It takes half a second to load, and nothing else here needs it.
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(folder)
    if torch is None:
        from triton_repo.executor.tokenizer_info import xgrammar_tokenizer_info  # noqa: PLC0415

        return xgrammar_tokenizer_info(tokenizer)
    from tensorrt_llm.llmapi.tokenizer import _xgrammar_tokenizer_info  # noqa: PLC0415

    info: dict[str, Any] = _xgrammar_tokenizer_info(tokenizer)
    return info


def given(**values: Any) -> dict[str, Any]:
    """The values that are set: the executor's constructors have defaults of their own."""
    return {name: value for name, value in values.items() if value is not None}
