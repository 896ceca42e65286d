"""Block accounting, reuse, eviction and the capacity policies."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.executor_client import (
    GOLDEN,
    golden_greedy,
    golden_prompt,
    request,
    run,
    start_golden,
    stats_until_idle,
)
from triton_repo.cpu_executor import bindings as trtllm
from triton_repo.cpu_executor import kv_cache
from triton_repo.cpu_executor.engine import load_config
from triton_repo.cpu_executor.kv_cache import BlockPool, SequenceCache
from triton_repo.cpu_executor.result import KvCacheMetrics

CONFIG = load_config(GOLDEN / "gqa")
SIZE = CONFIG.tokens_per_block
PROMPT = golden_prompt()
MAX_UTILIZATION = trtllm.SchedulerConfig(trtllm.CapacitySchedulerPolicy.MAX_UTILIZATION)


def filled(tokens: int, value: float) -> SequenceCache:
    cache = SequenceCache(CONFIG, tokens)
    cache.keys[:] = value
    cache.values[:] = -value
    cache.length = tokens
    return cache


def load(pool: BlockPool, tokens: list[int], task: int | None = None) -> int:
    return pool.load(SequenceCache(CONFIG, len(tokens)), tokens, task)


def test_reserve_and_fork_keep_what_is_there() -> None:
    cache = filled(SIZE, 3.0)
    twin = cache.fork()
    cache.reserve(5 * SIZE)
    assert len(cache.keys) == 5
    assert (cache.keys[0] == 3).all()
    assert not cache.keys[1:].any()
    cache.keys[0] = 9
    assert (twin.keys[0] == 3).all()
    cache.reserve(3)
    assert len(cache.keys) == 5


def test_stored_blocks_come_back_but_not_the_last_token() -> None:
    pool = BlockPool(8, SIZE, reuse=True)
    tokens = list(range(3 * SIZE))
    pool.store(filled(3 * SIZE, 2.0), tokens, None, 3 * SIZE, None)
    target = SequenceCache(CONFIG, 3 * SIZE)
    assert pool.load(target, tokens, None) == 2
    assert target.length == 2 * SIZE
    assert (target.keys[:2] == 2).all()
    assert (target.values[:2] == -2).all()
    assert not target.keys[2].any()
    assert load(pool, [*tokens, 1]) == 3
    assert load(pool, tokens, task=7) == 0
    assert load(pool, [9, *tokens[1:]]) == 0
    assert load(pool, [*tokens[:SIZE], *([0] * SIZE * 2)]) == 1
    assert load(BlockPool(8, SIZE, reuse=False), tokens) == 0


def test_metrics_count_a_prompt_once() -> None:
    pool = BlockPool(8, SIZE, reuse=True)
    metrics = KvCacheMetrics()
    pool.count(3 * SIZE + 1, 1, metrics)
    assert metrics == KvCacheMetrics(4, 3, 1, 3, 0.25)
    pool.count(SIZE, 0, KvCacheMetrics())
    stats = pool.stats()
    assert (stats.alloc_total_blocks, stats.alloc_new_blocks) == (5, 4)
    assert (stats.reused_blocks, stats.missed_blocks, stats.cache_hit_rate) == (1, 4, 0.2)


def retention(*ranges: tuple[int, int | None, int, Any]) -> trtllm.KvCacheRetentionConfig:
    kind = trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig
    return trtllm.KvCacheRetentionConfig([kind(*r) for r in ranges], 10)


def test_eviction_goes_by_priority_then_age() -> None:
    pool = BlockPool(3, SIZE, reuse=True)
    first, second, third = ([i] * SIZE for i in (1, 2, 3))
    pool.store(filled(SIZE, 1), first, None, SIZE, None)
    pool.store(filled(SIZE, 1), second, None, SIZE, retention((0, None, 90, None)))
    pool.store(filled(SIZE, 1), third, None, SIZE, None)
    assert load(pool, [*first, 0]) == 1
    pool.use(1)
    assert [load(pool, [*t, 0]) for t in (first, second, third)] == [1, 1, 0]
    pool.use(2)
    assert [load(pool, [*t, 0]) for t in (first, second, third)] == [0, 1, 0]


def test_priority_expires_and_generated_blocks_have_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(kv_cache, "time", SimpleNamespace(monotonic=lambda: now))
    pool = BlockPool(3, SIZE, reuse=True)
    brief = retention((0, None, 90, timedelta(seconds=1)))
    prompt = [1] * SIZE
    pool.store(filled(2 * SIZE, 1), [*prompt, *([5] * SIZE)], None, SIZE, brief)
    pool.store(filled(SIZE, 1), [2] * SIZE, None, SIZE, None)
    pool.use(1)
    assert load(pool, [*prompt, *([5] * SIZE), 0]) == 1
    assert load(pool, [*([2] * SIZE), 0]) == 1
    now = 1.0
    load(pool, [*([2] * SIZE), 0])
    pool.use(2)
    assert load(pool, [*prompt, 0]) == 0
    assert load(pool, [*([2] * SIZE), 0]) == 1


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 12),
            st.lists(st.integers(0, 1), max_size=5),
            st.sampled_from([None, 0, 50, 100]),
        ),
        max_size=25,
    )
)
def test_stored_and_used_blocks_never_exceed_the_budget(
    steps: list[tuple[int, list[int], int | None]],
) -> None:
    pool = BlockPool(12, SIZE, reuse=True)
    for used, blocks, priority in steps:
        pool.use(used)
        tokens = [token for block in blocks for token in [block] * SIZE]
        kept = None if priority is None else retention((0, None, priority, None))
        pool.store(filled(max(1, len(tokens)), 1), tokens, None, len(tokens), kept)
        assert pool.used + pool.stored_count <= pool.max_blocks
        assert load(pool, [*tokens, 0]) <= len(blocks)
        stats = pool.stats()
        assert stats.used_num_blocks + stats.free_num_blocks == stats.max_num_blocks


def test_reuse_does_not_change_the_output(tmp_path: Path) -> None:
    with start_golden(tmp_path) as executor:
        outputs = [run(executor, request(PROMPT, 20, return_perf_metrics=True))[0] for _ in "ab"]
        followed = PROMPT + golden_greedy()[:20] + [5, 6]
        (turn,) = run(executor, request(followed, 9, return_perf_metrics=True))
    off = trtllm.KvCacheConfig(enable_block_reuse=False)
    with start_golden(tmp_path, kv_cache_config=off) as executor:
        (fresh,) = run(executor, request(followed, 9, return_perf_metrics=True))
    reused = [o.last.request_perf_metrics.kv_cache_metrics.num_reused_blocks for o in outputs]
    assert reused == [0, 9]
    assert [o.tokens() for o in outputs] == [golden_greedy()[:20]] * 2
    assert turn.last.request_perf_metrics.kv_cache_metrics.num_reused_blocks == 10
    assert fresh.last.request_perf_metrics.kv_cache_metrics.num_reused_blocks == 0
    assert turn.tokens() == fresh.tokens()


def test_reuse_needs_paged_context_attention(tmp_path: Path) -> None:
    with start_golden(tmp_path, limits={"use_paged_context_fmha": False}) as executor:
        outputs = [run(executor, request(PROMPT, 2, return_perf_metrics=True))[0] for _ in "ab"]
    metrics = outputs[1].last.request_perf_metrics
    assert metrics is not None
    assert metrics.kv_cache_metrics.num_reused_blocks == 0


def small_pool(blocks: int, **more: Any) -> dict[str, Any]:
    return {"kv_cache_config": trtllm.KvCacheConfig(max_tokens=16 * blocks), **more}


@pytest.mark.parametrize("more", [{}, {"scheduler_config": MAX_UTILIZATION}])
def test_a_small_cache_changes_no_output(tmp_path: Path, more: dict[str, Any]) -> None:
    def requests() -> list[trtllm.Request]:
        made = [
            request(PROMPT[i : i + 20], 40, seed=i, top_p=1.0, streaming=False) for i in range(8)
        ]
        made[3] = request(PROMPT[:20], 40, num_return_sequences=2, top_p=1.0, streaming=False)
        return made

    with start_golden(tmp_path) as executor:
        alone = [run(executor, one)[0] for one in requests()]
    with start_golden(tmp_path, **small_pool(9, **more)) as executor:
        together = run(executor, *requests())
        stats = stats_until_idle(executor)
    for one, other in zip(alone, together, strict=True):
        assert [one.tokens(i) for i in (0, 1)] == [other.tokens(i) for i in (0, 1)]
    assert max(s.kv_cache_stats.used_num_blocks for s in stats) <= 9
    assert stats[-1].kv_cache_stats.used_num_blocks == 0
    paused = sum(s.inflight_batching_stats.num_paused_requests for s in stats)
    assert (paused > 0) == bool(more)


def test_paused_beams_go_on_as_before(tmp_path: Path) -> None:
    asked = [request(PROMPT[i : i + 20], 30, beam_width=2, streaming=False) for i in range(4)]
    with start_golden(tmp_path) as executor:
        alone = [run(executor, one)[0].last.output_token_ids for one in asked]
    settings = small_pool(10, scheduler_config=MAX_UTILIZATION)
    with start_golden(tmp_path, **settings) as executor:
        together = [o.last.output_token_ids for o in run(executor, *asked)]
        stats = executor.get_latest_iteration_stats()
    assert together == alone
    assert sum(s.inflight_batching_stats.num_paused_requests for s in stats) > 0


def test_guaranteed_no_evict_holds_requests_back(tmp_path: Path) -> None:
    with start_golden(tmp_path, **small_pool(9)) as executor:
        run(executor, *[request(PROMPT[i : i + 20], 40) for i in range(4)])
        stats = executor.get_latest_iteration_stats()
    # 60 tokens take 4 blocks, so only two of the four requests run at a time.
    assert max(s.inflight_batching_stats.num_scheduled_requests for s in stats) == 2
    assert max(s.num_active_requests for s in stats) == 4


def test_the_cache_limits_the_length(tmp_path: Path) -> None:
    with start_golden(tmp_path, **small_pool(4)) as executor:
        long, cut, wide = run(
            executor,
            request(PROMPT, 4),
            request(PROMPT[:40], 400),
            request(PROMPT[:40], 20, num_return_sequences=2, top_p=1.0),
        )
    assert "exceeds maximum input length (63)" in str(long.error)
    assert len(cut.tokens()) == 24
    assert "needs 8 KV cache blocks, the cache has 4" in str(wide.error)


def test_max_utilization_without_chunking_refuses_long_streams(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "scheduler_config": MAX_UTILIZATION,
        "limits": {"max_input_len": 32},
    }
    with start_golden(tmp_path, **settings) as executor:
        refused, whole = run(
            executor, request(PROMPT[:30], 10), request(PROMPT[:30], 10, streaming=False)
        )
    assert "Request sequence length is potentially greater than" in str(refused.error)
    assert len(whole.tokens()) == 40
    with start_golden(tmp_path, enable_chunked_context=True, **settings) as executor:
        assert len(run(executor, request(PROMPT[:30], 10))[0].tokens()) == 10


def test_long_prompts_do_not_hold_up_the_others(tmp_path: Path) -> None:
    with start_golden(tmp_path, least_iteration_ms=20) as executor:
        (first,) = executor.enqueue_requests([request(PROMPT[:20], 60)])
        assert executor.await_responses(first, 10.0)
        executor.enqueue_requests([request(PROMPT * 3, 2)])
        finals = 0
        while finals < 2:
            responses = executor.await_responses(timeout=60.0)
            finals += sum(r.result.is_final for r in responses)
        stats = executor.get_latest_iteration_stats()
    mixed = [s.inflight_batching_stats for s in stats if s.inflight_batching_stats.num_ctx_tokens]
    long = [s for s in mixed if s.num_ctx_tokens != 20]
    assert len(long) >= 4
    assert all(s.num_gen_requests == 1 and s.num_ctx_tokens <= 128 for s in long)


def test_max_num_tokens_limits_an_iteration(tmp_path: Path) -> None:
    with start_golden(tmp_path, max_num_tokens=64) as executor:
        (output,) = run(executor, request(PROMPT, 4))
        stats = executor.get_latest_iteration_stats()
    assert output.tokens() == golden_greedy()[:4]
    assert max(s.inflight_batching_stats.num_ctx_tokens for s in stats) == 64


def test_array_dtypes() -> None:
    assert filled(4, 1.0).keys.dtype == np.float32
