"""Cache sizes of TensorRT-LLM's PeftCacheManager, compared with values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.adapter import ModuleRows
from adapters.sizes import CacheSettings, cache_fit, recommend
from tests.support.lora_files import BASE

LLAMA_8B = replace(
    BASE,
    num_hidden_layers=32,
    hidden_size=4096,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_size=128,
    intermediate_size=14336,
    max_lora_rank=64,
)
LAYERS = tuple(range(32))


def _adapter(rank: int, modules: tuple[str, ...] = BASE.lora_target_modules) -> list[ModuleRows]:
    return [ModuleRows(module, rank, LAYERS) for module in modules]


def test_page_size_by_hand() -> None:
    """Check slots per rank and layer. in + out is 8192 for q and o, 5120 for k and v, 18432 for
    MLP.

    A slot is as wide as the smallest module, so these modules take 2, 1 and 4 slots.
    """
    fit = cache_fit(LLAMA_8B, [_adapter(8)], CacheSettings())
    slots = 32 * 8 * (2 + 1 + 1 + 2 + 4 + 4 + 4)
    assert fit.page_bytes == slots * 5120 * 2
    assert fit.pages_needed == 1
    assert fit.host_pages == -(-(2**30 // (5120 * 2)) // slots)
    # Rank 64 of each module, packed without gaps.
    values = 64 * 32 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    assert fit.host_min_bytes == -(-values // 5120) * 5120 * 2
    assert fit.gpu_pages is None
    assert fit.gpu_holds_all is None
    assert fit.gpu_adapters is None


def test_larger_rank_takes_whole_pages() -> None:
    assert cache_fit(LLAMA_8B, [_adapter(16)], CacheSettings()).pages_needed == 2
    # A row's slots are rounded up once, so rank 20 takes fewer than 20 times the slots of rank 1.
    assert cache_fit(LLAMA_8B, [_adapter(20)], CacheSettings()).pages_needed == 3
    assert cache_fit(LLAMA_8B, [_adapter(1)], CacheSettings()).pages_needed == 1
    only_qv = _adapter(16, ("attn_q", "attn_k", "attn_v"))
    assert cache_fit(LLAMA_8B, [only_qv], CacheSettings()).pages_needed == 1


def test_the_default_gigabyte_holds_a_dozen_of_rank_8_and_not_twice_as_many_of_rank_16() -> None:
    fit = cache_fit(LLAMA_8B, [_adapter(8)] * 3 + [_adapter(16)] * 6, CacheSettings())
    assert fit.host_pages == 23
    assert fit.pages_needed == 15
    assert fit.host_adapters == 11
    assert fit.host_holds_all
    assert not cache_fit(LLAMA_8B, [_adapter(16)] * 12, CacheSettings()).host_holds_all


def test_tensor_and_pipeline_parallelism_share_the_work() -> None:
    parallel = replace(LLAMA_8B, tp_size=2, pp_size=2)
    fit = cache_fit(parallel, [_adapter(8)], CacheSettings(gpu_bytes=2**27))
    # TP 2 halves out, or in for o and down: in + out is 6144 (q, o), 4608 (k, v), 11264 (MLP).
    slots = 16 * 8 * (2 + 1 + 1 + 2 + 3 + 3 + 3)
    assert fit.page_bytes == slots * 4608 * 2
    assert fit.pages_needed == 1
    assert fit.gpu_pages == -(-(2**27 // (4608 * 2)) // slots)
    assert fit.gpu_holds_all
    assert fit.gpu_adapters == fit.gpu_pages


def test_the_engine_s_rank_limit_caps_both_sizes() -> None:
    small = replace(LLAMA_8B, max_lora_rank=4)
    capped = CacheSettings(optimal_adapter_size=4, max_adapter_size=4)
    assert cache_fit(small, [_adapter(4)], CacheSettings()) == cache_fit(
        small, [_adapter(4)], capped
    )


@pytest.mark.parametrize("ranks", [[8], [16] * 10, [4, 8, 64], [1]])
def test_recommended_settings_hold_the_set(ranks: list[int]) -> None:
    adapters = [_adapter(rank) for rank in ranks]
    best = recommend(LLAMA_8B, adapters)
    fit = cache_fit(LLAMA_8B, adapters, best)
    assert fit.host_holds_all
    assert best.host_bytes >= fit.host_min_bytes
    assert best.max_adapter_size == max(ranks)
    default = cache_fit(LLAMA_8B, adapters, CacheSettings(max_adapter_size=max(ranks)))
    assert best.host_bytes <= default.bytes_needed


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 8))
def test_needed_bytes_are_enough_and_one_page_less_is_not(
    ranks: list[int], optimal: int, largest: int
) -> None:
    adapters = [
        [ModuleRows(module, rank, (0, 1)) for module in BASE.lora_target_modules] for rank in ranks
    ]
    trial = CacheSettings(1, None, optimal, max(largest, *ranks))
    fit = cache_fit(BASE, adapters, trial)
    enough = cache_fit(BASE, adapters, replace(trial, host_bytes=fit.bytes_needed))
    assert enough.host_holds_all
    short = (fit.pages_needed - 1) * fit.page_bytes
    assert not cache_fit(BASE, adapters, replace(trial, host_bytes=short)).host_holds_all
