"""Who brings an adapter in, who waits, and that no slot is ever lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.triton.residency import Residency


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_request_carries_and_a_hundred_wait() -> None:
    residency = Residency()
    assert await residency.must_carry(7)
    others = [asyncio.create_task(residency.must_carry(7)) for _ in range(100)]
    await _settle()
    assert not any(task.done() for task in others)
    assert await residency.must_carry(8)  # another adapter does not wait
    residency.loaded(7)
    assert await asyncio.gather(*others) == [None] * 100


async def test_after_a_failed_load_the_next_one_carries() -> None:
    residency = Residency()
    assert await residency.must_carry(7)
    others = [asyncio.create_task(residency.must_carry(7)) for _ in range(2)]
    await _settle()
    residency.not_loaded(7)
    await _settle()
    [first] = [task for task in others if task.done()]
    assert first.result() is not None
    residency.loaded(7)
    assert (await asyncio.gather(*others)).count(None) == 1


class _Turns:
    """Of one tenant: they come one by one, when `come` is called."""

    def __init__(self) -> None:
        self.line: list[asyncio.Future[None]] = []
        self.taken = 0

    @asynccontextmanager
    async def next(self) -> AsyncIterator[None]:
        waits = asyncio.get_running_loop().create_future()
        self.line.append(waits)
        try:
            await waits
        finally:
            self.line.remove(waits)
        self.taken += 1
        yield
        self.taken -= 1

    def come(self) -> None:
        self.line[0].set_result(None)


async def test_whichever_tenant_has_its_turn_first_brings_it() -> None:
    residency = Residency()
    one, other = _Turns(), _Turns()
    busy = [asyncio.create_task(residency.must_carry(7, "busy", one.next)) for _ in range(3)]
    await _settle()
    assert len(one.line) == 1  # the others of its tenant wait for it
    assert residency.has(7)
    free = asyncio.create_task(residency.must_carry(7, "free", other.next))
    await _settle()
    other.come()
    turn = await free
    assert turn is not None
    await _settle()
    assert one.line == []
    residency.loaded(7)
    assert await asyncio.gather(*busy) == [None] * 3
    assert (one.taken, other.taken) == (0, 1)
    await turn.aclose()
    assert other.taken == 0


async def test_of_two_turns_in_one_moment_one_is_given_back() -> None:
    residency = Residency()
    turns = {tenant: _Turns() for tenant in "ab"}
    tasks = [
        asyncio.create_task(residency.must_carry(7, tenant, turns[tenant].next)) for tenant in "ab"
    ]
    await _settle()
    for tenant in "ab":
        turns[tenant].come()
    await _settle()
    assert [task.done() for task in tasks] == [True, False]
    assert (turns["a"].taken, turns["b"].taken) == (1, 0)
    residency.not_loaded(7)
    await _settle()
    turns["b"].come()
    assert await tasks[1] is not None


async def test_who_leaves_the_line_is_followed_by_another_of_its_tenant() -> None:
    residency = Residency()
    turns = _Turns()
    first, second = [
        asyncio.create_task(residency.must_carry(7, "a", turns.next)) for _ in range(2)
    ]
    await _settle()
    first.cancel()
    await _settle()
    assert first.cancelled()
    turns.come()
    assert await second is not None


async def test_causes() -> None:
    residency = Residency()
    assert residency.cause(7) == "first_use"
    await residency.must_carry(7)
    residency.loaded(7)
    residency.evicted(7)
    assert residency.cause(7) == "evicted"
    assert await residency.must_carry(7)
    residency.loaded(7)
    residency.restarted()
    assert residency.cause(7) == "restarted"
    assert await residency.must_carry(7)


async def test_later_twice_as_many_are_tried_and_not_all_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    residency = Residency()
    for task_id in range(4):
        await residency.take_slot(task_id)
    residency.overflow(0, 1)  # three at once, then
    waiting = [asyncio.create_task(residency.take_slot(10 + number)) for number in range(20)]
    await _settle()
    for most in (6, 12):
        now += 31
        residency.give_back_slot(min(residency.active))
        await _settle()
        assert len(residency.active) == most
    for task in waiting:
        task.cancel()


async def test_after_an_overflow_a_new_adapter_waits_for_an_idle_one() -> None:
    residency = Residency()
    for task_id in (1, 2, 3):
        await residency.take_slot(task_id)
    residency.overflow(3, 1)  # two at once, then
    residency.give_back_slot(3)
    await residency.take_slot(2)  # an adapter in use needs no slot
    waiting = asyncio.create_task(residency.take_slot(3))
    await _settle()
    assert residency.waiting == {3}
    residency.give_back_slot(2)
    await _settle()
    assert not waiting.done()  # 2 still has a request
    residency.give_back_slot(2)
    await waiting
    assert residency.active == {1, 3}


async def test_waiting_is_first_come_first_served() -> None:
    residency = Residency()
    for task_id in (1, 2):
        await residency.take_slot(task_id)
    residency.overflow(2, 1)  # one at once, then
    residency.give_back_slot(2)
    order: list[int] = []

    async def use(task_id: int) -> None:
        await residency.take_slot(task_id)
        order.append(task_id)
        await asyncio.sleep(0)
        residency.give_back_slot(task_id)

    tasks = [asyncio.create_task(use(task_id)) for task_id in (5, 6, 7)]
    await _settle()
    residency.give_back_slot(1)
    await asyncio.gather(*tasks)
    assert order == [5, 6, 7]


async def test_one_tenants_many_adapters_are_not_before_anothers_one() -> None:
    residency = Residency()
    for task_id in range(4):
        await residency.take_slot(task_id, "many")
    residency.overflow(0, 1)  # three at once, then
    many = [asyncio.create_task(residency.take_slot(10 + n, "many")) for n in range(50)]
    await _settle()
    one = asyncio.create_task(residency.take_slot(100, "one"))
    await _settle()
    for task_id in (0, 1):
        residency.give_back_slot(task_id, "many")
    await _settle()
    assert one.done()  # who has the fewest is next
    assert not any(task.done() for task in many)
    residency.give_back_slot(2, "many")
    await _settle()
    assert [task.done() for task in many] == [True] + [False] * 49
    for task in many:
        task.cancel()


async def test_an_adapter_in_use_waits_for_none_of_a_tenant_with_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    residency = Residency()
    for task_id, tenant in enumerate(("many", "many", "many", "one")):
        await residency.take_slot(task_id, tenant)
    residency.overflow(3, 1)
    many = asyncio.create_task(residency.take_slot(10, "many"))
    await _settle()
    now += 2
    one = asyncio.create_task(residency.take_slot(3, "one"))
    same = asyncio.create_task(residency.take_slot(2, "many"))
    await _settle()
    assert one.done()
    assert not same.done()  # or that tenant's first in line might wait for ever
    residency.give_back_slot(0, "many")
    residency.give_back_slot(1, "many")
    await asyncio.gather(many, same)


async def test_adapters_of_a_tenant_with_more_go_idle_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    residency = Residency()
    for task_id in range(3):
        await residency.take_slot(task_id, "many")
    residency.overflow(2, 1)
    residency.give_back_slot(2, "many")
    one = asyncio.create_task(residency.take_slot(10, "one"))
    await _settle()
    await residency.take_slot(0, "many")
    residency.give_back_slot(0, "many")
    now += 2
    again = asyncio.create_task(residency.take_slot(0, "many"))
    await _settle()
    assert not again.done()
    residency.give_back_slot(0, "many")
    await one
    assert not again.done()
    residency.give_back_slot(1, "many")
    await again
    assert residency.active == {0, 10}


async def test_what_is_too_large_for_the_cache_takes_nothing_from_others() -> None:
    residency = Residency()
    for task_id in range(6):
        await residency.take_slot(task_id)
    big = 100
    for before, at_once in enumerate((6, 4, 1)):  # ever larger steps, until it is alone
        await residency.take_slot(big)
        assert not residency.may_be_too_large(9)
        residency.overflow(big, 9, before)
        residency.give_back_slot(big)
        while len(residency.active) > at_once - 1:
            residency.give_back_slot(max(residency.active))
    others = [asyncio.create_task(residency.take_slot(task_id)) for task_id in (1, 2, 3, 4, 5)]
    await residency.take_slot(big)
    assert residency.may_be_too_large(9)
    residency.overflow(big, 9, 3)
    residency.refuse(big)
    await asyncio.gather(*others)  # as many as before it came
    assert residency.refuses(big, 9)
    assert not residency.refuses(1, 1)


@pytest.mark.parametrize("how", ["time", "restart", "one as large"])
async def test_what_was_refused_is_tried_again(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    residency = Residency()
    await residency.take_slot(7)
    residency.refuse(7)
    assert residency.refuses(7, 9)
    if how == "time":
        now += 301
    elif how == "restart":
        residency.restarted()
    else:
        assert await residency.must_carry(8)
        residency.loaded(8, 9)
    assert not residency.refuses(7, 9)


async def test_what_is_no_larger_than_others_lowers_by_one_and_alone_not_at_all() -> None:
    """Other gateways may have the rest of the cache in use."""
    residency = Residency()
    for task_id in range(6):
        await residency.take_slot(task_id)
    assert await residency.must_carry(0)
    residency.loaded(0, 9)
    residency.overflow(5, 9, before=3)
    residency.give_back_slot(5)
    waits = asyncio.create_task(residency.take_slot(5))
    await _settle()
    assert not waits.done()
    residency.give_back_slot(4)
    await waits
    for task_id in (1, 2, 3, 5):
        residency.give_back_slot(task_id)
    assert not residency.may_be_too_large(9)
    residency.overflow(0, 9)
    for task_id in (1, 2, 3, 4):
        await residency.take_slot(task_id)


_REQUESTS = st.tuples(st.integers(1, 4), st.sampled_from("ab"), st.booleans())


@given(st.lists(_REQUESTS, max_size=30), st.integers(1, 3))
def test_no_slot_is_lost_whoever_is_cancelled(
    plan: list[tuple[int, str, bool]], limit: int
) -> None:
    async def scenario() -> None:
        residency = Residency()
        for task_id in range(100, 100 + limit + 1):
            await residency.take_slot(task_id)
        residency.overflow(100, 1)
        for task_id in range(100, 100 + limit + 1):
            residency.give_back_slot(task_id)

        async def use(task_id: int, tenant: str) -> None:
            await residency.take_slot(task_id, tenant)
            try:
                assert len(residency.active) <= limit
                await asyncio.sleep(0)
            finally:
                residency.give_back_slot(task_id, tenant)

        tasks = []
        for task_id, tenant, cancel in plan:
            tasks.append(asyncio.create_task(use(task_id, tenant)))
            await asyncio.sleep(0)
            if cancel:
                tasks[len(tasks) // 2].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
        assert not residency.active
        assert not residency.waiting

    asyncio.run(scenario())
