"""``LoRARequest``, and a cache of the adapters that such requests refer to."""

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

# The LLM API's default of `max_cpu_loras` in `lora_config`.
MAX_CPU_LORAS = 4


@dataclass(frozen=True)
class LoRARequest:
    """Reference to an adapter's folder on this machine.

    Requests with equal ``lora_int_id`` use the same adapter, even if their other fields differ.
    """

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
    """Cache of adapters by ``lora_int_id``, which evicts the least recently used adapter.

    The first request with an id reads the adapter's folder. Later requests use the cached tensors.
    An evicted adapter is read again when a request needs it, and then gets a new `task_id`. If the
    folder has changed since, the executor therefore uses the new tensors: its own cache has the old
    tensors under the old `task_id`. Not thread-safe.
    """

    def __init__(self, engine_folder: Path, max_cpu_loras: int | None) -> None:
        """Create an empty cache. Raises ``UnsupportedEngine`` for an engine folder without LoRA.

        ``max_cpu_loras`` is the number of adapters to hold; None selects `MAX_CPU_LORAS`.
        """
        self._base = read_base_model(engine_folder, ())
        self._limit = max_cpu_loras or MAX_CPU_LORAS
        self._adapters: OrderedDict[int, LoraConfig] = OrderedDict()
        self._task_ids = itertools.count(1)

    def get(self, request: LoRARequest) -> LoraConfig:
        """Return the adapter in the executor's format, from the cache or its folder.

        Raises ``AdapterError`` if the adapter cannot be used. Raises ``ValueError`` if its format
        is not PEFT's.
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
        # Do not compare the names of base models: as in TensorRT-LLM, the caller is responsible for
        # choosing an adapter of this model.
        settings = replace(adapter.settings, base_model_name_or_path=None)
        converted = convert(replace(adapter, settings=settings), self._base)
        dtype = np.float16 if converted.dtype == "float16" else np.uint16
        rows = list(converted.config_rows())
        weights = np.frombuffer(converted.weights, dtype).reshape(len(rows), -1)
        return LoraConfig(next(self._task_ids), weights, np.array(rows, np.int32))
