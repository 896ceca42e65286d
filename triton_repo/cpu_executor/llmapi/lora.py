"""``LoRARequest``, and the adapters read from the paths in such requests."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from adapters.base_model import read_base_model
from adapters.convert import convert
from adapters.peft import read
from triton_repo.cpu_executor.request_config import LoraConfig

# Default of the LLM API if `lora_config` has no `max_cpu_loras`.
MAX_CPU_LORAS = 4


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its folder on this machine. ``lora_int_id`` alone identifies it."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        if not Path(self.lora_path).exists():
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")
        if self.lora_ckpt_source not in ("hf", "nemo"):
            raise ValueError(f"lora_ckpt_source: found {self.lora_ckpt_source}; allowed: hf, nemo")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id


class LoraAdapters:
    """Adapters by id, with eviction of the least recently used one.

    The first use of an id reads its path; later ones use the stored adapter. An evicted adapter is
    read again. Each read has its own number in the executor. Not thread-safe.
    """

    def __init__(self, engine_folder: Path, max_cpu_loras: int | None) -> None:
        """Create an empty set. Raises ``UnsupportedEngine`` for an engine folder without LoRA."""
        self._base = read_base_model(engine_folder, ())
        self._limit = max_cpu_loras or MAX_CPU_LORAS
        self._adapters: OrderedDict[int, LoraConfig] = OrderedDict()
        self._task_ids = itertools.count(1)

    def get(self, request: LoRARequest) -> LoraConfig:
        """Return the executor's tensors.

        Raises ``AdapterError``, or ``ValueError`` for other formats.
        """
        key = request.adapter_id
        if key not in self._adapters:
            self._adapters[key] = self._read(request)
            if len(self._adapters) > self._limit:
                self._adapters.popitem(last=False)
        self._adapters.move_to_end(key)
        return self._adapters[key]

    def _read(self, request: LoRARequest) -> LoraConfig:
        if request.lora_ckpt_source != "hf":
            raise ValueError("lora_ckpt_source: the CPU executor reads hf alone")
        adapter = read(Path(request.lora_path))
        # As in TensorRT-LLM: the caller is responsible for matching adapter and base model.
        settings = replace(adapter.settings, base_model_name_or_path=None)
        converted = convert(replace(adapter, settings=settings), self._base)
        dtype = np.float16 if converted.dtype == "float16" else np.uint16
        rows = list(converted.config_rows())
        weights = np.frombuffer(converted.weights, dtype).reshape(len(rows), -1)
        return LoraConfig(next(self._task_ids), weights, np.array(rows, np.int32))
