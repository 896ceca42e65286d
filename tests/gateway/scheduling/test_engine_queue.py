"""`EngineQueue`: limits, fairness between tenants, and no lost slots."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Collection, Iterator, Sequence
from typing import cast

import pytest

from gateway.errors import Overloaded
from gateway.scheduling.engine_queue import EngineQueue
from gateway.scheduling.forecast import MIN_SAMPLES
from gateway.scheduling.kinds import Lane
from gateway.scheduling.queues import Scope


def _admission(limit: int, *, queue: int = 1000, wait_s: float = 60.0, share: float = 1.0):  # type: ignore[no-untyped-def]
    return EngineQueue(lambda: limit, lambda: share, queue=queue, wait_s=wait_s)


async def test_no_more_than_the_limit_run_at_once() -> None:
    admission, running, most = _admission(3), 0, 0

    async def one() -> None:
        nonlocal running, most
        async with admission.permit("a"):
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1

    await asyncio.gather(*[one() for _ in range(30)])
    assert most == 3
    assert (admission.in_flight, admission.waiting) == (0, 0)


async def test_a_flood_of_one_tenant_delays_another_by_one_place() -> None:
    admission, order = _admission(2), []

    async def one(tenant: str) -> None:
        async with admission.permit(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    flood = [asyncio.create_task(one("a")) for _ in range(100)]
    await asyncio.sleep(0)
    await asyncio.gather(*[one("b") for _ in range(3)], *flood)
    # b gets every second slot from its arrival on, although 100 requests of a came first.
    assert [i for i, tenant in enumerate(order) if tenant == "b"][-1] < 10


async def test_a_higher_priority_goes_first() -> None:
    admission, order = _admission(2), []

    async def one(tenant: str, priority: int) -> None:
        async with admission.permit(tenant, priority):
            order.append(tenant)
            await asyncio.sleep(0.001)

    await asyncio.gather(*[one("a", 0) for _ in range(20)], *[one("b", 5) for _ in range(20)])
    assert order[2:22] == ["b"] * 20


async def test_one_tenant_leaves_places_for_the_next() -> None:
    admission = _admission(8, share=0.75)
    mine = [admission.permit("a") for _ in range(6)]
    for permit in mine:
        await permit.__aenter__()
    waits = asyncio.create_task(admission.permit("a").__aenter__())
    await asyncio.sleep(0)
    assert admission.waiting == 1
    async with asyncio.timeout(300), admission.permit("b"):
        assert admission.in_flight == 7
    waits.cancel()


async def test_a_full_queue_refuses_at_once() -> None:
    admission = _admission(1, queue=1)
    async with admission.permit("a"):
        waits = asyncio.create_task(admission.permit("a").__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="waiting"):
            await admission.permit("a").__aenter__()
        waits.cancel()


async def test_in_a_full_queue_the_longest_line_gives_way() -> None:
    admission = _admission(1, queue=4)
    async with admission.permit("a"):
        mine = [asyncio.create_task(admission.permit("a").__aenter__()) for _ in range(4)]
        await asyncio.sleep(0)
        other = asyncio.create_task(admission.permit("b").__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await mine[-1]
        assert admission.waiting == 4
        for task in [*mine[:-1], other]:
            task.cancel()


async def test_a_full_queue_is_never_relieved_by_what_has_begun() -> None:
    """A resumed request is not evicted, even if it is the newest and only one in its lane.

    A lane is the set of model variants that can run a request.
    """
    admission, lane = _admission(1, queue=4), frozenset({object()})
    async with admission.permit("a"):
        mine = [asyncio.create_task(admission.permit("a").__aenter__()) for _ in range(3)]
        await asyncio.sleep(0)
        begun = asyncio.create_task(admission.permit("a", lane=lane, is_resumed=True).__aenter__())
        await asyncio.sleep(0)
        other = asyncio.create_task(admission.permit("b").__aenter__())
        with pytest.raises(Overloaded):
            await mine[-1]
        assert not begun.done()
        for task in [*mine[:-1], begun, other]:
            task.cancel()


async def test_where_all_that_wait_have_begun_the_next_is_refused() -> None:
    admission = _admission(1, queue=2)
    async with admission.permit("a"):
        begun = [
            asyncio.create_task(admission.permit("a", is_resumed=True).__aenter__())
            for _ in range(2)
        ]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await admission.permit("b").__aenter__()
        assert not any(task.done() for task in begun)
        for task in begun:
            task.cancel()


async def test_a_lane_in_which_nobody_waits_any_more_is_not_asked_for() -> None:
    asked: list[object] = []

    def scopes(lane: Lane, _: Collection[Lane]) -> Sequence[Scope]:
        asked.append(lane)
        return (Scope(2),)

    admission, rare = (
        EngineQueue(lambda: 2, scopes=scopes, queue=9, wait_s=60),
        frozenset({object()}),
    )
    busy = admission.permit("a"), admission.permit("a", lane=rare)
    for permit in busy:
        await permit.__aenter__()
    waits = [asyncio.create_task(admission.permit("a", lane=rare).__aenter__()) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    waits[1].cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    waits = [asyncio.create_task(admission.permit("a").__aenter__()) for _ in range(2)]
    await asyncio.sleep(0)
    asked.clear()
    busy[1].release()
    assert rare not in asked
    for waiting in waits:
        waiting.cancel()


async def test_who_waits_too_long_is_told() -> None:
    admission = _admission(1, wait_s=0.01)
    async with admission.permit("a"):
        with pytest.raises(Overloaded, match=r"0\.01 seconds") as refused:
            await admission.permit("b").__aenter__()
    assert refused.value.wait_s == 0.01
    assert (admission.in_flight, admission.waiting) == (0, 0)


async def test_a_tenant_with_a_line_is_told_nothing_of_anothers() -> None:
    admission = _admission(1, queue=2, wait_s=60)
    async with admission.permit("a"):
        of_b = asyncio.create_task(admission.permit("b").__aenter__())
        await asyncio.sleep(0.2)
        began = time.monotonic()
        of_c = asyncio.create_task(admission.permit("c").__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await admission.permit("c").__aenter__()
        assert refused.value.wait_s <= time.monotonic() - began
        of_b.cancel()
        of_c.cancel()


async def test_who_is_refused_is_told_how_long_others_have_waited() -> None:
    admission = _admission(1, queue=1, wait_s=60)
    async with admission.permit("a"):
        waits = asyncio.create_task(admission.permit("b").__aenter__())
        await asyncio.sleep(0)
        began = time.monotonic()
        await asyncio.sleep(0.05)
        waited = time.monotonic() - began
        with pytest.raises(Overloaded) as refused:
            await admission.permit("c").__aenter__()
        assert refused.value.wait_s >= waited
        waits.cancel()


async def test_places_that_appear_are_handed_out() -> None:
    limit = [0]
    admission = EngineQueue(lambda: limit[0], queue=10, wait_s=60)
    waits = asyncio.create_task(admission.permit("a").__aenter__())
    await asyncio.sleep(0)
    assert admission.waiting == 1
    limit[0] = 1
    admission.grant_free_slots()
    await waits
    assert admission.in_flight == 1


@pytest.fixture(params=range(20))
def chance(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    return random.Random(request.param)


async def test_no_place_is_lost_whenever_a_request_is_cancelled(chance: random.Random) -> None:
    admission = _admission(2, queue=6, wait_s=0.01)

    async def one(tenant: str) -> None:
        async with admission.permit(tenant):
            await asyncio.sleep(chance.random() * 0.004)

    tasks = []
    for _ in range(60):
        tasks.append(asyncio.create_task(one(chance.choice("abc"))))
        if chance.random() < 0.6:
            chance.choice(tasks).cancel()
        if chance.random() < 0.3:
            await asyncio.sleep(chance.random() * 0.003)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (admission.in_flight, admission.waiting) == (0, 0)
    assert not admission._pool.queues
    async with asyncio.timeout(300), admission.permit("a"), admission.permit("b"):
        pass


async def test_choices_are_counted_one_by_one() -> None:
    admission = _admission(4)
    async with admission.permit("a", cost=3):
        assert admission.in_flight == 3
        two = asyncio.create_task(admission.permit("b", cost=2).__aenter__())
        await asyncio.sleep(0)
        assert admission.waiting == 1
    await two
    assert admission.in_flight == 2


async def test_what_can_never_have_its_turn_holds_nobody_up() -> None:
    """Other requests overtake one that needs more slots than its tenant may have."""
    admission = _admission(4, share=0.5, wait_s=0.05)
    assert admission.max_cost() == 2
    large = asyncio.create_task(admission.permit("a", priority=9, cost=3).__aenter__())
    await asyncio.sleep(0)
    async with admission.permit("b"), admission.permit("b"), admission.permit("c"):
        assert (admission.in_flight, admission.waiting) == (3, 1)
    with pytest.raises(Overloaded):
        await large


async def test_many_beams_are_waited_for_by_those_alone_who_have_more() -> None:
    admission = _admission(8, share=0.75)
    held = [await admission.permit("a").__aenter__() for _ in range(6)]
    beams = asyncio.create_task(admission.permit("b", cost=4).__aenter__())
    await asyncio.sleep(0)
    more_of_a = asyncio.create_task(admission.permit("a").__aenter__())
    await asyncio.sleep(0)
    async with asyncio.timeout(300), admission.permit("c"), admission.permit("c"):
        assert (admission.in_flight, admission.waiting) == (8, 2)
    held.pop().release()
    held.pop().release()
    await beams
    assert not more_of_a.done()
    more_of_a.cancel()


async def test_a_request_that_has_begun_goes_on_before_its_tenants_next() -> None:
    """A resumed request may exceed the queue's size and waiting time."""
    admission, order = _admission(1, queue=1, wait_s=0.01), []

    async def one(name: str, *, goes_on: bool = False) -> None:
        permit = admission.permit("a", wait_s=60 if goes_on else None, is_resumed=goes_on)
        async with permit:
            order.append(name)

    async with admission.permit("a"):
        new = asyncio.create_task(one("new"))
        await asyncio.sleep(0)
        next_one = asyncio.create_task(one("next", goes_on=True))
        with pytest.raises(Overloaded):
            await new
        assert admission.waiting == 1
        new = asyncio.create_task(one("new"))
        await asyncio.sleep(0)
        assert admission.waiting == 1, "the queue is full for those that have not begun"
    await asyncio.gather(next_one, new, return_exceptions=True)
    assert order[0] == "next"


async def test_a_deadline_ends_the_waiting_of_a_request_that_has_begun() -> None:
    admission = _admission(1)
    async with admission.permit("a"):
        with pytest.raises(TimeoutError):
            await admission.permit("a", wait_s=0.01, is_resumed=True).__aenter__()
    assert (admission.in_flight, admission.waiting) == (0, 0)


async def test_a_request_with_many_choices_is_not_passed_for_ever() -> None:
    admission, done = _admission(8, share=0.5), asyncio.Event()

    async def keep_busy(tenant: str) -> None:
        while not done.is_set():
            async with admission.permit(tenant):
                await asyncio.sleep(0.001)

    busy = [asyncio.create_task(keep_busy(tenant)) for tenant in "abcd" for _ in range(4)]
    await asyncio.sleep(0.01)
    async with asyncio.timeout(300), admission.permit("e", priority=10, cost=4):
        assert admission.in_flight <= 8
    done.set()
    await asyncio.gather(*busy)


async def test_a_deadline_that_has_passed_is_not_waited_for() -> None:
    admission = _admission(1)
    async with admission.permit("a"):
        with pytest.raises(TimeoutError):
            await admission.permit("b", wait_s=0).__aenter__()


async def test_a_lane_that_is_full_is_forecast_by_itself() -> None:
    rare = frozenset({object()})

    def scopes(lane: Lane, _: Collection[Lane]) -> Sequence[Scope]:
        return (Scope(3), *([Scope(1, {rare}, rare)] if lane == rare else []))

    admission = EngineQueue(lambda: 3, scopes=scopes, queue=9, wait_s=60)
    for _ in range(8):
        async with admission.permit("a", lane=rare):
            await asyncio.sleep(0.01)
    async with admission.permit("a", lane=rare):
        with pytest.raises(Overloaded) as refused:
            await admission.permit("a", lane=rare, first_token_s=0.001).__aenter__()
        assert refused.value.cause == "expected_wait"
        assert refused.value.wait_s > 0.001
        async with admission.permit("a", first_token_s=0.001):
            assert admission.in_flight == 2
        # With a later deadline the request is queued.
        waits = asyncio.create_task(
            admission.permit("a", lane=rare, first_token_s=3600).__aenter__()
        )
        await asyncio.sleep(0)
        assert admission.waiting == 1
    await waits


async def test_of_a_burst_at_the_start_only_what_may_be_served_in_time_is_queued() -> None:
    """Nothing is known of the tenant's requests yet, so two seconds for each are assumed."""
    admission = EngineQueue(lambda: 4, queue=1000, wait_s=30)

    def enter() -> asyncio.Task[None]:
        permit = admission.permit("a", first_token_s=60, max_expected_s=10)
        return asyncio.create_task(permit.__aenter__())

    burst = [enter() for _ in range(150)]
    await asyncio.sleep(0)
    assert admission.in_flight == 4
    assert MIN_SAMPLES <= admission.waiting <= 21
    refused = [task for task in burst if task.done() and task.exception()]
    assert len(refused) == 150 - 4 - admission.waiting
    assert {cast(Overloaded, task.exception()).cause for task in refused} == {"expected_wait"}
    for task in burst:
        task.cancel()
    await asyncio.gather(*burst, return_exceptions=True)


async def test_the_first_requests_of_a_tenant_wait_however_few_slots_there_are() -> None:
    admission = EngineQueue(lambda: 1, queue=1000, wait_s=30)
    async with admission.permit("a"):
        burst = [
            asyncio.create_task(
                admission.permit("a", first_token_s=60, max_expected_s=0.1).__aenter__()
            )
            for _ in range(20)
        ]
        await asyncio.sleep(0)
        assert admission.waiting == MIN_SAMPLES
        for task in burst:
            task.cancel()
        await asyncio.gather(*burst, return_exceptions=True)


async def test_a_resumed_answer_overtakes_those_of_its_tenant_that_still_wait() -> None:
    admission, order = _admission(1), []

    async def one(name: str, *, is_resumed: bool = False) -> None:
        async with admission.permit("a", is_resumed=is_resumed):
            order.append(name)

    async with admission.permit("a"):
        tasks = [asyncio.create_task(one("new"))]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(one("resumed", is_resumed=True)))
        await asyncio.sleep(0)
        assert admission.waiting == 2
    await asyncio.gather(*tasks)
    assert order == ["resumed", "new"]


async def test_a_full_queue_evicts_nobody_who_waits_for_about_as_many_slots() -> None:
    admission = _admission(1, queue=2)
    async with admission.permit("a"):
        waits = [asyncio.create_task(admission.permit(name).__aenter__()) for name in "ab"]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await admission.permit("c").__aenter__()
        assert not any(task.done() for task in waits)
        for task in waits:
            task.cancel()


async def test_slots_that_were_reserved_are_granted_when_their_request_gives_up() -> None:
    admission = _admission(3)
    async with admission.permit("a"), admission.permit("a"):
        large = asyncio.create_task(admission.permit("b", priority=1, cost=2).__aenter__())
        await asyncio.sleep(0)
        small = asyncio.create_task(admission.permit("c").__aenter__())
        await asyncio.sleep(0)
        assert (admission.in_flight, admission.waiting) == (2, 2)
        large.cancel()
        async with asyncio.timeout(300):
            (await small).release()
