"""Budget of active adapters: order of the grants, waiting requests, and that no slot is lost."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.triton.adapter_budget import AdapterBudget


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_later_twice_as_many_are_tried_and_not_all_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    room = AdapterBudget()
    for task_id in range(4):
        await room.acquire(task_id)
    room.reduce_limit()  # the limit is now three adapters
    waiting = [asyncio.create_task(room.acquire(10 + number)) for number in range(20)]
    await _settle()
    for most in (6, 12):
        now += 31
        room.release(min(room.active))
        await _settle()
        assert len(room.active) == most
    for task in waiting:
        task.cancel()


async def test_after_an_overflow_a_new_adapter_waits_for_an_idle_one() -> None:
    room = AdapterBudget()
    for task_id in (1, 2, 3):
        await room.acquire(task_id)
    room.reduce_limit()  # the limit is now two adapters
    room.release(3)
    await room.acquire(2)  # an adapter in use needs no slot
    waiting = asyncio.create_task(room.acquire(3))
    await _settle()
    assert room.waiting == {3}
    room.release(2)
    await _settle()
    assert not waiting.done()  # adapter 2 still has a request
    room.release(2)
    await waiting
    assert room.active == {1, 3}


async def test_waiting_is_first_come_first_served() -> None:
    room = AdapterBudget()
    for task_id in (1, 2):
        await room.acquire(task_id)
    room.reduce_limit()  # the limit is now one adapter
    room.release(2)
    order: list[int] = []

    async def use(task_id: int) -> None:
        await room.acquire(task_id)
        order.append(task_id)
        await asyncio.sleep(0)
        room.release(task_id)

    tasks = [asyncio.create_task(use(task_id)) for task_id in (5, 6, 7)]
    await _settle()
    room.release(1)
    await asyncio.gather(*tasks)
    assert order == [5, 6, 7]


async def test_one_tenants_many_adapters_are_not_before_anothers_one() -> None:
    room = AdapterBudget()
    for task_id in range(4):
        await room.acquire(task_id, "many")
    room.reduce_limit()  # the limit is now three adapters
    many = [asyncio.create_task(room.acquire(10 + n, "many")) for n in range(50)]
    await _settle()
    one = asyncio.create_task(room.acquire(100, "one"))
    await _settle()
    for task_id in (0, 1):
        room.release(task_id, "many")
    await _settle()
    assert one.done()  # the tenant with the fewest adapters is next
    assert not any(task.done() for task in many)
    room.release(2, "many")
    await _settle()
    assert [task.done() for task in many] == [True] + [False] * 49
    for task in many:
        task.cancel()


async def test_an_adapter_in_use_waits_for_none_of_a_tenant_with_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    room = AdapterBudget()
    for task_id, tenant in enumerate(("many", "many", "many", "one")):
        await room.acquire(task_id, tenant)
    room.reduce_limit()
    many = asyncio.create_task(room.acquire(10, "many"))
    await _settle()
    now += 2
    one = asyncio.create_task(room.acquire(3, "one"))
    same = asyncio.create_task(room.acquire(2, "many"))
    await _settle()
    assert one.done()
    assert not same.done()  # otherwise the first request in that tenant's queue might wait for ever
    room.release(0, "many")
    room.release(1, "many")
    await asyncio.gather(many, same)


async def test_adapters_of_a_tenant_with_more_go_idle_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    room = AdapterBudget()
    for task_id in range(3):
        await room.acquire(task_id, "many")
    room.reduce_limit()
    room.release(2, "many")
    one = asyncio.create_task(room.acquire(10, "one"))
    await _settle()
    await room.acquire(0, "many")
    room.release(0, "many")
    now += 2
    again = asyncio.create_task(room.acquire(0, "many"))
    await _settle()
    assert not again.done()
    room.release(0, "many")
    await one
    assert not again.done()
    room.release(1, "many")
    await again
    assert room.active == {0, 10}


_REQUESTS = st.tuples(st.integers(1, 4), st.sampled_from("ab"), st.booleans())


@given(st.lists(_REQUESTS, max_size=30), st.integers(1, 3))
def test_no_slot_is_lost_whoever_is_cancelled(
    plan: list[tuple[int, str, bool]], limit: int
) -> None:
    async def scenario() -> None:
        room = AdapterBudget()
        for task_id in range(100, 100 + limit + 1):
            await room.acquire(task_id)
        room.reduce_limit()
        for task_id in range(100, 100 + limit + 1):
            room.release(task_id)

        async def use(task_id: int, tenant: str) -> None:
            await room.acquire(task_id, tenant)
            try:
                assert len(room.active) <= limit
                await asyncio.sleep(0)
            finally:
                room.release(task_id, tenant)

        tasks = []
        for task_id, tenant, cancel in plan:
            tasks.append(asyncio.create_task(use(task_id, tenant)))
            await asyncio.sleep(0)
            if cancel:
                tasks[len(tasks) // 2].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
        assert not room.active
        assert not room.waiting

    asyncio.run(scenario())
