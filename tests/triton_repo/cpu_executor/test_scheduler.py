"""The scheduler: starting, pausing and planning of requests."""

from __future__ import annotations

import pytest

from tests.support.executor_client import GOLDEN, request
from triton_repo.cpu_executor.active import ActiveRequest
from triton_repo.cpu_executor.attention import QUERY_TILE
from triton_repo.cpu_executor.bindings import CapacitySchedulerPolicy
from triton_repo.cpu_executor.engine import load_config
from triton_repo.cpu_executor.kv_cache import BlockPool, SequenceCache
from triton_repo.cpu_executor.mailbox import Queued
from triton_repo.cpu_executor.scheduler import PREFILL_TOKENS, Scheduler

CONFIG = load_config(GOLDEN / "gqa")
SIZE = 16


def active(number: int, prompt: int, max_tokens: int) -> ActiveRequest:
    return ActiveRequest(Queued(number, request([5] * prompt, max_tokens), 1), max_tokens)


def begin(item: ActiveRequest, cached: int, generated: int = 0) -> None:
    (sequence,) = item.sequences
    sequence.cache = SequenceCache(CONFIG, cached + 1)
    sequence.cache.length = cached
    for _ in range(generated):
        sequence.append(7, 0.0)


def scheduler(policy: CapacitySchedulerPolicy, blocks: int) -> tuple[Scheduler, BlockPool]:
    pool = BlockPool(blocks, SIZE, reuse=False)
    return Scheduler(policy, pool, 8192), pool


def test_guaranteed_no_evict_counts_the_whole_length() -> None:
    planner, pool = scheduler(CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, 6)
    items = [active(i, SIZE, SIZE) for i in range(4)]
    begin(items[0], SIZE, 1)
    starting, paused = planner.schedule(items)
    assert (starting, paused) == (items[1:3], 0)
    # Blocks are reserved for the next step: two for the running request, one for each prompt.
    assert pool.used == 4


def test_a_large_request_is_not_overtaken() -> None:
    planner, _ = scheduler(CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, 6)
    items = [active(0, SIZE, SIZE), active(1, 5 * SIZE, 1), active(2, 1, 1)]
    begin(items[0], SIZE, 1)
    assert planner.schedule(items) == ([], 0)


def test_max_utilization_pauses_the_latest() -> None:
    planner, pool = scheduler(CapacitySchedulerPolicy.MAX_UTILIZATION, 5)
    items = [active(i, SIZE, 100) for i in range(3)]
    for item in items:
        begin(item, SIZE, 1)
    starting, paused = planner.schedule(items)
    assert (starting, paused, pool.used) == ([], 1, 4)
    assert [item.is_started for item in items] == [True, True, False]
    assert {work.request.id for work in planner.plan(items[:2])} == {0, 1}


def test_static_batches_start_together() -> None:
    planner, _ = scheduler(CapacitySchedulerPolicy.STATIC_BATCH, 100)
    items = [active(i, 3, 3) for i in range(3)]
    assert planner.schedule(items[:2]) == (items[:2], 0)
    begin(items[0], 3, 1)
    assert planner.schedule(items) == ([], 0)


def test_a_plan_has_all_steps_and_some_aligned_prompt_pieces() -> None:
    planner, _ = scheduler(CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, 1000)
    items = [active(0, 400, 9), active(1, 20, 9), active(2, 500, 9), active(3, 1, 9)]
    begin(items[0], QUERY_TILE)
    begin(items[1], 20, 1)
    begin(items[2], 0)
    begin(items[3], 0)
    works = planner.plan(items)
    assert [(w.request.id, len(w.tokens), w.last) for w in works] == [
        (1, 1, True),
        (0, PREFILL_TOKENS, False),
    ]
    begin(items[0], 390)
    works = planner.plan(items)
    assert [(w.request.id, len(w.tokens), w.last) for w in works] == [
        (1, 1, True),
        (3, 1, True),
        (0, 10, True),
        (2, QUERY_TILE, False),
    ]


@pytest.mark.parametrize(("cached", "expected"), [(0, (20, False)), (20, (1, False)), (21, None)])
def test_after_a_pause_the_last_id_is_left_for_a_step(
    cached: int, expected: tuple[int, bool] | None
) -> None:
    planner, _ = scheduler(CapacitySchedulerPolicy.MAX_UTILIZATION, 1000)
    item = active(0, 19, 9)
    begin(item, 0, 3)
    cache = item.sequences[0].cache
    assert cache is not None
    cache.length = cached
    (work,) = planner.plan([item])
    if expected is None:
        assert (work.tokens, work.last) == ([7], True)
    else:
        assert (len(work.tokens), work.last) == (21 - cached, False)
