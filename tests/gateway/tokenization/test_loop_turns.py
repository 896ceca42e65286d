"""The event loop scheduler: one step per loop iteration, round robin over tenants."""

from __future__ import annotations

import asyncio

from gateway.tokenization.loop_scheduler import LoopScheduler


async def test_tenants_take_steps_in_turn() -> None:
    turns = LoopScheduler()
    order: list[str] = []

    async def work(tenant: str) -> None:
        for _ in range(4):
            await turns.wait_step(tenant)
            order.append(tenant)

    await asyncio.gather(*[work(tenant) for tenant in "aaabc"])
    # Step 0 ran before other tenants had queued.
    for start in (1, 4, 7, 10):
        assert sorted(order[start : start + 3]) == ["a", "b", "c"]
    assert len(order) == 20


async def test_one_step_in_a_turn_of_the_loop() -> None:
    turns = LoopScheduler()
    loop = asyncio.get_running_loop()
    number = 0
    steps: list[int] = []

    def count() -> None:
        nonlocal number
        number += 1
        loop.call_soon(count)

    count()

    async def work(tenant: str) -> None:
        for _ in range(5):
            await turns.wait_step(tenant)
            steps.append(number)

    await asyncio.gather(*[work(tenant) for tenant in "abab"])
    assert len(set(steps)) == len(steps) == 20


async def test_a_step_is_taken_at_once_if_no_other_is() -> None:
    turns = LoopScheduler()
    for _ in range(2):
        turn = turns.wait_step("a")
        try:
            turn.send(None)
        except StopIteration:
            taken = True
        else:
            taken = False
        assert taken
        await asyncio.sleep(0)


async def test_what_is_cancelled_takes_no_step() -> None:
    turns = LoopScheduler()
    await turns.wait_step("a")
    waiting = [asyncio.create_task(turns.wait_step("a")) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    waiting[1].cancel()
    await waiting[2]
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not turns._waiting
