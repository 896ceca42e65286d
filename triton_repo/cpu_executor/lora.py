"""LoRA adapters of the CPU executor.

This module validates the adapter tensors in requests, caches the adapters in host memory, and adds
the adapters' updates to the layers of the model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.checks import PREFIX
from triton_repo.cpu_executor.engine import CpuEngineConfig
from triton_repo.cpu_executor.engine_dtype import has_engine_dtype, to_float32
from triton_repo.cpu_executor.executor_config import PeftCacheConfig
from triton_repo.cpu_executor.linear import Linear
from triton_repo.cpu_executor.request_config import LoraConfig

Array = NDArray[np.float32]
GIB = 1 << 30

# Names of the modules that adapters may change in a Llama engine, by TensorRT-LLM's module id.
MODULE_NAMES = {
    1: "attn_q",
    2: "attn_k",
    3: "attn_v",
    4: "attn_dense",
    5: "mlp_h_to_4h",
    6: "mlp_4h_to_h",
    7: "mlp_gate",
}
# Maps each projection of the model to the ids of its LoRA modules. If a projection fuses several
# modules, its weight matrix has the rows of the modules in this order. For a Llama, TensorRT-LLM
# calls the checkpoint's gate_proj mlp_h_to_4h, and the checkpoint's up_proj mlp_gate.
PROJECTIONS = {
    "qkv": (1, 2, 3),
    "output": (4,),
    "gate_up": (5, 7),
    "down": (6,),
}


class LoraError(Exception):
    """The adapter of a request cannot be used.

    If ``bare`` is True, the client receives the message without the prefix `FETCH_ERROR`.
    """

    def __init__(self, text: str, *, bare: bool = False) -> None:
        super().__init__(text)
        self.bare = bare


class Foldable(Protocol):
    """Interface of a model to which LoRA adapters can be applied.

    A model may permute or scale the rows of its q, k and v weights. ``fold_qkv`` changes the rows
    of an adapter in the same way.
    """

    def fold_qkv(self, parts: Sequence[Any]) -> list[Any]: ...


@dataclass(frozen=True)
class PreparedAdapter:
    """An adapter whose matrices have been converted for the model's fused projections.

    ``factors`` maps (layer, name in ``PROJECTIONS``) to the two low-rank matrices (A, B).
    """

    factors: dict[tuple[int, str], tuple[Linear, Linear]]


def module_sizes(config: CpuEngineConfig, module: int) -> tuple[int, int]:
    """Return the input and output size of a module; ``module`` is TensorRT-LLM's id."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query = config.num_attention_heads * config.head_size
    key = config.num_key_value_heads * config.head_size
    return {
        1: (hidden, query),
        2: (hidden, key),
        3: (hidden, key),
        4: (query, hidden),
        5: (hidden, inner),
        6: (inner, hidden),
        7: (hidden, inner),
    }[module]


def element_count(config: CpuEngineConfig, module: int, rank: int) -> int:
    """Return the number of an adapter's values for one module in one layer, without padding."""
    return rank * sum(module_sizes(config, module))


def validate(config: CpuEngineConfig, weights: NDArray[Any], rows: NDArray[Any]) -> None:
    """Raise ``LoraError``, with TensorRT-LLM's message, if an adapter does not fit the engine.

    ``weights`` and ``rows`` are ``LoraConfig.weights`` and ``LoraConfig.config``.
    """

    def expect(condition: bool, text: str) -> None:
        if not condition:
            raise LoraError(PREFIX + text)

    expect(
        has_engine_dtype(config, weights),
        "Expected lora weights to be the same data type as base model",
    )
    expect(rows.dtype == np.int32, "Expected lora config tensor to have type kINT32")
    expect(rows.shape[1] in (3, 4), "Expected dim2 of lora_keys to have a size in [3, 4]")
    for row in rows.tolist():
        module, layer, rank = row[:3]
        name = MODULE_NAMES.get(module, str(module))
        expect(
            0 <= layer < config.num_hidden_layers,
            "Expected layerId to be in the range [0, numModelLayers)",
        )
        expect(rank > 0, "Expected adapterSize to be > 0")
        expect(name in config.lora_target_modules, f"lora module {name} not enabled for this model")
        limit = config.max_lora_rank
        expect(
            rank <= limit,
            f"Invalid low_rank ({rank}). low_rank must be smaller than mMaxLowRank ({limit})",
        )
        expect(
            weights.shape[1] >= element_count(config, module, rank),
            f"lora_weights has to few values for {name}",
        )
        expect(len(row) == 3 or row[3] == 0, "DoRA is not supported by the CPU executor")


def prepare(
    config: CpuEngineConfig, model: Foldable | None, weights: NDArray[Any], rows: NDArray[Any]
) -> PreparedAdapter:
    """Convert an adapter's validated tensors to matrices for the model's fused projections."""
    if model is None:
        return PreparedAdapter({})
    parts: dict[tuple[int, int], tuple[Array, Array]] = {}
    for line, row in zip(weights, rows.tolist(), strict=True):
        module, layer, rank = row[:3]
        size_in, size_out = module_sizes(config, module)
        used = line[: element_count(config, module, rank)]
        values = to_float32(config, used)
        parts[layer, module] = (
            values[: rank * size_in].reshape(rank, size_in),
            values[rank * size_in :].reshape(size_out, rank),
        )
    factors = {}
    for layer in {key[0] for key in parts}:
        for name, modules in PROJECTIONS.items():
            found = [parts.get((layer, module)) for module in modules]
            if any(part is not None for part in found):
                factors[layer, name] = _fuse(config, model, name, modules, found)
    return PreparedAdapter(factors)


def _fuse(
    config: CpuEngineConfig,
    model: Foldable,
    name: str,
    modules: Sequence[int],
    parts: Sequence[tuple[Array, Array] | None],
) -> tuple[Linear, Linear]:
    """Return the matrices (A, B) of a fused projection.

    A stacks the A matrices of the modules. B is block-diagonal, and its blocks are the B matrices
    of the modules. An entry of ``parts`` is None if the adapter does not change that module.
    """
    ranks = [0 if part is None else len(part[0]) for part in parts]
    ups = [
        np.zeros((module_sizes(config, module)[1], sum(ranks)), np.float32) for module in modules
    ]
    start = 0
    for up, part, rank in zip(ups, parts, ranks, strict=True):
        if part is not None:
            up[:, start : start + rank] = part[1]
        start += rank
    if name == "qkv":
        ups = model.fold_qkv(ups)
    down = np.concatenate([part[0] for part in parts if part is not None])
    return Linear(down), Linear(np.concatenate(ups))


class CachedAdapter:
    """A cached adapter. ``size`` is in bytes.

    ``in_flight`` is the number of active requests that use the adapter. An adapter in use is not
    evicted.
    """

    def __init__(self, task_id: int, size: int, adapter: Future[PreparedAdapter]) -> None:
        self.task_id = task_id
        self.size = size
        self.in_flight = 0
        self._adapter = adapter

    @property
    def is_ready(self) -> bool:
        return self._adapter.done()

    @property
    def error(self) -> BaseException | None:
        """The exception that the preparation raised, or None.

        Blocks until the preparation has ended.
        """
        return self._adapter.exception()

    @property
    def adapter(self) -> PreparedAdapter:
        """The prepared adapter.

        Blocks until the preparation has ended, and raises its exception.
        """
        return self._adapter.result()


class LoraCache:
    """The host cache of adapters by task id, with a limit in bytes. Not thread-safe.

    The limit counts an adapter's values in the engine's dtype, without padding. If a task id is
    already cached, the weights in a request with this id are ignored, as in TensorRT-LLM. A
    separate thread prepares new adapters, so a large adapter does not delay other requests.
    """

    def __init__(
        self, config: CpuEngineConfig, model: Foldable | None, settings: PeftCacheConfig
    ) -> None:
        """Create the cache.

        The model is None for the synthetic engine, where adapters have no effect. Raises
        ``RuntimeError`` if the limit is too small for one adapter of the largest size.
        """
        self._config = config
        self._model = model
        self._limit = GIB if settings.host_cache_size is None else settings.host_cache_size
        self._cached: OrderedDict[int, CachedAdapter] = OrderedDict()
        self._bytes = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="executor-lora")
        largest = min(settings.max_adapter_size, config.max_lora_rank)
        needed = sum(
            self._item_size * element_count(config, module, largest) * config.num_hidden_layers
            for module, name in MODULE_NAMES.items()
            if name in config.lora_target_modules
        )
        if self._limit < needed:
            raise RuntimeError(
                f"{PREFIX}Not enough space allocated to host LoRA cache to hold 1 max sized LoRA "
                f"{self._limit} < {needed}"
            )

    @property
    def bytes(self) -> int:
        return self._bytes

    @property
    def task_ids(self) -> list[int]:
        """Task ids of the cached adapters, least recently used adapter first."""
        return list(self._cached)

    def acquire(self, lora: LoraConfig) -> CachedAdapter:
        """Return the adapter of a request, and mark it as used by one more request.

        If the cache does not have the adapter, add it from the tensors in the request. The caller
        must call ``release`` when the request has ended. Raises ``LoraError`` if the tensors are
        missing or invalid, or if the cache is full.
        """
        entry = self._cached.get(lora.task_id)
        if entry is None:
            entry = self._insert(lora)
        self._cached.move_to_end(lora.task_id)
        entry.in_flight += 1
        return entry

    def release(self, entry: CachedAdapter) -> None:
        entry.in_flight -= 1

    def forget(self, entry: CachedAdapter) -> None:
        """Remove an adapter from the cache."""
        if self._cached.get(entry.task_id) is entry:
            del self._cached[entry.task_id]
            self._bytes -= entry.size

    def close(self) -> None:
        self._worker.shutdown()

    @property
    def _item_size(self) -> int:
        return 4 if self._config.dtype == "float32" else 2

    def _insert(self, lora: LoraConfig) -> CachedAdapter:
        task_id, weights, rows = lora.task_id, lora.weights, lora.config
        if weights is None or rows is None:
            raise LoraError(
                f"LoRA task {task_id} not found in cache. Please send LoRA weights with request",
                bare=True,
            )
        validate(self._config, weights, rows)
        size = sum(
            self._item_size * element_count(self._config, row[0], row[2]) for row in rows.tolist()
        )
        self._evict_for(task_id, size)
        future = self._worker.submit(prepare, self._config, self._model, weights, rows)
        entry = CachedAdapter(task_id, size, future)
        self._cached[task_id] = entry
        self._bytes += size
        return entry

    def _evict_for(self, task_id: int, size: int) -> None:
        idle = [entry for entry in self._cached.values() if entry.in_flight == 0]
        if self._bytes - sum(entry.size for entry in idle) + size > self._limit:
            raise LoraError(f"PEFT Cache is full. Could not store taskId={task_id}", bare=True)
        for entry in idle:
            if self._bytes + size <= self._limit:
                break
            self.forget(entry)


class LoraBatch:
    """The adapters that are used in one packed batch.

    ``rows`` has, for each adapter, the indices of the batch's rows (tokens) that use the adapter.
    """

    def __init__(self, rows: Sequence[tuple[PreparedAdapter, NDArray[np.int64]]]) -> None:
        self._groups = rows

    def add(self, layer: int, projection: str, x: Array, y: Array) -> None:
        """Add the adapters' updates: ``y[rows] += x[rows] @ A.T @ B.T``.

        Adapters that do not change this projection are skipped.
        """
        for adapter, rows in self._groups:
            factors = adapter.factors.get((layer, projection))
            if factors is None:
                continue
            down, up = factors
            y[rows] += up(down(x[rows]))
