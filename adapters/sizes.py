"""Number of adapters that fit in TensorRT-LLM's LoRA caches, and recommended cache settings.

The computation follows `PeftCacheManager::getPageManagerConfig` and `LoraCache::determineNumPages`
(cpp/tensorrt_llm, v0.17). A cache consists of pages with `slots_per_page` slots, and a slot has
`page_width` values. An adapter occupies complete pages. The adapter's rows are stored in these
pages in order, and no row crosses a page boundary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from adapters.adapter import ITEM_BYTES, MODULE_IDS, ModuleRows
from adapters.base_model import BaseModel
from adapters.modules import module_sizes, splits_input

DEFAULT_HOST_BYTES = 1024**3
DEFAULT_OPTIMAL_SIZE = 8
DEFAULT_MAX_SIZE = 64


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """LoRA cache parameters of the `tensorrt_llm` model in Triton.

    Attributes:
        host_bytes: size of the host cache in bytes, `lora_cache_host_memory_bytes`.
        gpu_bytes: size of the GPU cache in bytes; None if unknown. This is the GPU memory that
            engine and KV cache leave free, times lora_cache_gpu_memory_fraction.
        optimal_adapter_size: LoRA rank in `lora_cache_optimal_adapter_size`.
        max_adapter_size: LoRA rank in `lora_cache_max_adapter_size`.
    """

    host_bytes: int = DEFAULT_HOST_BYTES
    gpu_bytes: int | None = None
    optimal_adapter_size: int = DEFAULT_OPTIMAL_SIZE
    max_adapter_size: int = DEFAULT_MAX_SIZE


@dataclass(frozen=True, slots=True)
class CacheFit:
    """Result of `cache_fit`: the pages that a set of adapters needs, and the pages of the caches.

    All numbers are for one GPU and host. If the host cache is smaller than `host_min_bytes`,
    TensorRT-LLM does not start ("Not enough space allocated to host LoRA cache"). `host_adapters`
    is the number of adapters that fit into the host cache together, if each is as large as the
    set's largest adapter. `gpu_adapters` is this number for the GPU cache.
    """

    page_bytes: int
    pages_needed: int
    largest_pages: int
    host_pages: int
    gpu_pages: int | None
    host_min_bytes: int

    @property
    def host_holds_all(self) -> bool:
        return self.pages_needed <= self.host_pages

    @property
    def gpu_holds_all(self) -> bool | None:
        return None if self.gpu_pages is None else self.pages_needed <= self.gpu_pages

    @property
    def host_adapters(self) -> int:
        return self.host_pages // self.largest_pages

    @property
    def gpu_adapters(self) -> int | None:
        return None if self.gpu_pages is None else self.gpu_pages // self.largest_pages

    @property
    def bytes_needed(self) -> int:
        """Size in bytes of the smallest cache that holds all adapters of the set."""
        return max(self.pages_needed * self.page_bytes, self.host_min_bytes)


def cache_fit(
    base: BaseModel, adapters: Sequence[Sequence[ModuleRows]], settings: CacheSettings
) -> CacheFit:
    """Compare the pages that a set of adapters needs with the pages of an engine's LoRA caches.

    Each item of `adapters` is the `Converted.modules` of one adapter.
    """
    pages = _Pages.of(base, settings)
    alike = Counter(tuple(adapter) for adapter in adapters)
    needed = {adapter: pages.count(base, adapter) for adapter in alike}
    return CacheFit(
        page_bytes=pages.slots * pages.width * ITEM_BYTES,
        pages_needed=sum(needed[adapter] * number for adapter, number in alike.items()),
        largest_pages=max(needed.values(), default=1),
        host_pages=pages.in_bytes(settings.host_bytes),
        gpu_pages=None if settings.gpu_bytes is None else pages.in_bytes(settings.gpu_bytes),
        host_min_bytes=pages.min_slots * pages.width * ITEM_BYTES,
    )


def recommend(base: BaseModel, adapters: Sequence[Sequence[ModuleRows]]) -> CacheSettings:
    """Return the settings for the smallest host cache that holds all these adapters.

    `max_adapter_size` is the largest rank of the adapters. `optimal_adapter_size` is also a rank,
    from which TensorRT-LLM computes the page size. All ranks up to the largest rank are tried. The
    result has the rank with which the adapters need the fewest bytes.
    """
    largest = max((rows.rank for adapter in adapters for rows in adapter), default=1)
    best: CacheSettings | None = None
    for optimal in range(1, largest + 1):
        trial = CacheSettings(1, None, optimal, largest)
        needed = cache_fit(base, adapters, trial).bytes_needed
        if best is None or needed < best.host_bytes:
            best = CacheSettings(needed, None, optimal, largest)
    assert best is not None
    return best


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


@dataclass(frozen=True, slots=True)
class _Pages:
    width: int
    slots: int
    min_slots: int

    @classmethod
    def of(cls, base: BaseModel, settings: CacheSettings) -> _Pages:
        sizes = [_local_size(module, base) for module in base.lora_target_modules]
        width = min(sizes)
        layers = base.num_hidden_layers // base.pp_size
        optimal = min(settings.optimal_adapter_size, base.max_lora_rank)
        largest = min(settings.max_adapter_size, base.max_lora_rank)
        one_optimal = layers * optimal * sum(_ceil_div(size, width) for size in sizes)
        one_row = _ceil_div(largest * max(sizes), width)
        one_largest = _ceil_div(largest * layers * sum(sizes), width)
        return cls(width, max(one_optimal, one_row), one_largest)

    def in_bytes(self, size: int) -> int:
        return _ceil_div(size // (self.width * ITEM_BYTES), self.slots)

    def count(self, base: BaseModel, adapter: Iterable[ModuleRows]) -> int:
        """Return the number of pages for an adapter on the pipeline stage that needs most pages."""
        layers = base.num_hidden_layers // base.pp_size
        rows = sorted(
            (layer, MODULE_IDS[group.module], group.rank * _local_size(group.module, base))
            for group in adapter
            for layer in group.layers
        )
        return max(
            self._lay([size for layer, _, size in rows if layer // layers == stage])
            for stage in range(base.pp_size)
        )

    def _lay(self, sizes: list[int]) -> int:
        pages, slot = 1, 0
        for size in sizes:
            slots = _ceil_div(size, self.width)
            if slot + slots > self.slots:
                pages, slot = pages + 1, 0
            slot += slots
        return pages


def _local_size(module: str, base: BaseModel) -> int:
    """Return the sum of a module's input and output size on one GPU of a tensor parallel group.

    On this GPU, a LoRA row of rank r has r times this number of values.
    """
    inputs, outputs = module_sizes(module, base)
    if module == "moe_router":
        return inputs + outputs
    if splits_input(module):
        return inputs // base.tp_size + outputs
    return inputs + outputs // base.tp_size
