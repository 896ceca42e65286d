"""Uploads of adapters: which request uploads the weights, and which requests wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.triton.residency import Residency


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_request_carries_and_a_hundred_wait() -> None:
    residency = Residency()
    assert await residency.acquire_upload(7)
    others = [asyncio.create_task(residency.acquire_upload(7)) for _ in range(100)]
    await _settle()
    assert not any(task.done() for task in others)
    assert await residency.acquire_upload(8)  # a request for another adapter does not wait
    residency.mark_loaded(7)
    assert await asyncio.gather(*others) == [None] * 100


async def test_after_a_failed_load_the_next_one_carries() -> None:
    residency = Residency()
    assert await residency.acquire_upload(7)
    others = [asyncio.create_task(residency.acquire_upload(7)) for _ in range(2)]
    await _settle()
    residency.mark_not_loaded(7)
    await _settle()
    [first] = [task for task in others if task.done()]
    assert first.result() is not None
    residency.mark_loaded(7)
    assert (await asyncio.gather(*others)).count(None) == 1


class _Turns:
    """The turns of one tenant: `come` gives the next turn."""

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
    busy = [asyncio.create_task(residency.acquire_upload(7, "busy", one.next)) for _ in range(3)]
    await _settle()
    assert len(one.line) == 1  # other requests of the tenant wait for the first one
    assert residency.is_resident_or_loading(7)
    free = asyncio.create_task(residency.acquire_upload(7, "free", other.next))
    await _settle()
    other.come()
    turn = await free
    assert turn is not None
    await _settle()
    assert one.line == []
    residency.mark_loaded(7)
    assert await asyncio.gather(*busy) == [None] * 3
    assert (one.taken, other.taken) == (0, 1)
    await turn.aclose()
    assert other.taken == 0


async def test_of_two_turns_in_one_moment_one_is_given_back() -> None:
    residency = Residency()
    turns = {tenant: _Turns() for tenant in "ab"}
    tasks = [
        asyncio.create_task(residency.acquire_upload(7, tenant, turns[tenant].next))
        for tenant in "ab"
    ]
    await _settle()
    for tenant in "ab":
        turns[tenant].come()
    await _settle()
    assert [task.done() for task in tasks] == [True, False]
    assert (turns["a"].taken, turns["b"].taken) == (1, 0)
    residency.mark_not_loaded(7)
    await _settle()
    turns["b"].come()
    assert await tasks[1] is not None


async def test_who_leaves_the_line_is_followed_by_another_of_its_tenant() -> None:
    residency = Residency()
    turns = _Turns()
    first, second = [
        asyncio.create_task(residency.acquire_upload(7, "a", turns.next)) for _ in range(2)
    ]
    await _settle()
    first.cancel()
    await _settle()
    assert first.cancelled()
    turns.come()
    assert await second is not None


async def test_causes() -> None:
    residency = Residency()
    assert residency.upload_cause(7) == "first_use"
    await residency.acquire_upload(7)
    residency.mark_loaded(7)
    residency.mark_evicted(7)
    assert residency.upload_cause(7) == "evicted"
    assert await residency.acquire_upload(7)
    residency.mark_loaded(7)
    residency.mark_restarted()
    assert residency.upload_cause(7) == "restarted"
    assert await residency.acquire_upload(7)
