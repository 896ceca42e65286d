"""The queue before a busy event loop: fair between tenants, with refusals only above capacity."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.scheduling.start_queue import (
    BYTES_PER_UNIT,
    MAX_BURST_WAIT_S,
    MAX_REQUEST_WORK,
    MAX_STEADY_WAIT_S,
    MAX_TURN_WORK,
    MAX_WAIT_S,
    MAX_WAITING,
    StartQueue,
    work_of,
)
from gateway.service_setup import connect_to_deliveries
from gateway.triton.http2.deliveries import delivery_queue

LONG_TURN_S = 0.01
SETTLE_S = 4


class Loop:
    """A fake event loop, whose iterations take as long as the test says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.begun: list[str] = []
        self.refused: list[tuple[str, float]] = []
        self.waited: list[float] = []
        self._planned: list[Callable[[], None]] = []
        self.queue = StartQueue(lambda: self.now, self._planned.append)

    def ask(self, tenant: str = "a", work: int = 1) -> None:
        if self.queue.try_begin(work):
            self.begun.append(tenant)
            return
        asked = self.now

        def begin() -> bool:
            self.begun.append(tenant)
            self.waited.append(self.now - asked)
            return True

        wait_s = self.queue.wait(tenant, work, begin)
        if wait_s is not None:
            self.refused.append((tenant, wait_s))

    def turn(self, seconds: float) -> int:
        """End the iteration after `seconds`. Return how many requests began in the next one."""
        self.now += seconds
        before = len(self.begun)
        planned, self._planned[:] = list(self._planned), []
        for callback in planned:
            callback()
        return len(self.begun) - before


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_an_idle_loop_begins_at_once(loop: Loop) -> None:
    for _ in range(1000):
        loop.ask()
        loop.turn(0.0001)
    assert loop.begun == ["a"] * 1000
    assert not loop.waited


@pytest.mark.parametrize("streams", [1, 64, 200, 512])
@pytest.mark.parametrize("turn_s", [0.002, 0.02])
def test_a_burst_is_served_whole(loop: Loop, streams: int, turn_s: float) -> None:
    for _ in range(streams):
        loop.ask()
    while loop.queue.waiting:
        loop.turn(turn_s)
    assert len(loop.begun) == streams
    assert not loop.refused


def test_a_burst_of_large_prompts_is_served_whole_though_it_takes_long(loop: Loop) -> None:
    for _ in range(200):
        loop.ask(work=9)
    while loop.queue.waiting:
        loop.turn(0.02)
    assert max(loop.waited) > MAX_WAIT_S
    assert not loop.refused


def test_a_closed_loop_is_never_refused(loop: Loop) -> None:
    """Requests of 300 streams, each 0.3 s after the last one of its stream, are not refused."""
    due = [0.0] * 300
    for _ in range(1000):
        before = len(loop.begun)
        for _ in range(sum(at <= loop.now for at in due)):
            loop.ask()
        due = [at for at in due if at > loop.now]
        loop.turn(0.005 + 0.0015 * MAX_TURN_WORK)
        due += [loop.now + 0.3] * (len(loop.begun) - before)
    assert not loop.refused
    assert len(loop.begun) > 3_900
    assert loop.waited


def test_many_streams_that_wait_for_their_answers_are_not_refused(loop: Loop) -> None:
    """More streams than capacity, each waiting for its answers, are queued but never refused.

    Their requests wait for longer than those of a flood may.
    """
    turn_s, answer_s, streams = 0.01, 1.28, 820
    due = [number / 300 for number in range(streams)]
    while loop.now < 12:
        asked = sum(at <= loop.now for at in due)
        due = [at for at in due if at > loop.now]
        before = len(loop.begun)
        for _ in range(asked):
            loop.ask()
        loop.turn(turn_s)
        due += [loop.now + answer_s] * (len(loop.begun) - before)
    assert not loop.refused
    assert MAX_WAIT_S < max(loop.waited) < MAX_STEADY_WAIT_S


def test_turns_that_had_little_to_begin_say_nothing_of_the_pace(loop: Loop) -> None:
    for _ in range(200):
        while not loop.queue.waiting:
            loop.ask()
        assert loop.turn(LONG_TURN_S) == 1
    for _ in range(150):
        loop.ask()
    assert not loop.refused


def test_a_burst_of_as_many_as_may_wait_is_served_whole(loop: Loop) -> None:
    for _ in range(MAX_WAITING):
        loop.ask()
    while loop.queue.waiting:
        loop.turn(MAX_BURST_WAIT_S / MAX_WAITING * MAX_TURN_WORK)
    assert len(loop.begun) == MAX_WAITING


def test_one_long_turn_refuses_nobody(loop: Loop) -> None:
    for _ in range(200):
        loop.ask()
    loop.turn(1.5)
    for _ in range(100):
        loop.ask()
        loop.turn(0.005)
    assert not loop.refused


def _flood(
    loop: Loop,
    seconds: float,
    per_s: dict[str, float],
    *,
    work: int = 1,
    turn_s: float = LONG_TURN_S,
) -> Counter[str]:
    """Send requests at the rates `per_s` for `seconds`.

    Return the number of requests per tenant.
    """
    chance, asked, credit = random.Random(1), Counter[str](), dict.fromkeys(per_s, 0.0)
    end = loop.now + seconds
    while loop.now < end:
        for name, rate in per_s.items():
            credit[name] += rate * turn_s * chance.uniform(0.5, 1.5)
            while credit[name] >= 1:
                credit[name] -= 1
                asked[name] += 1
                loop.ask(name, work)
        loop.turn(turn_s)
    return asked


@pytest.mark.parametrize(("times", "work"), [(3, 1), (10, 1), (4, 3), (10, 3)])
def test_a_flood_is_refused_early_and_what_is_served_has_not_waited_long(
    loop: Loop, times: int, work: int
) -> None:
    carried = MAX_TURN_WORK / LONG_TURN_S / work
    _flood(loop, SETTLE_S, {"a": times * carried}, work=work)
    for each in (loop.begun, loop.refused, loop.waited):
        each.clear()
    asked = _flood(loop, 10, {"a": times * carried}, work=work)
    assert len(loop.begun) >= 0.95 * 10 * carried
    # Every request has begun, was refused, or is queued; the queue fits into the maximum wait.
    assert asked["a"] - len(loop.begun) - len(loop.refused) <= 1.5 * carried * MAX_WAIT_S
    assert max(loop.waited) <= 1.2 * MAX_WAIT_S
    assert all(0.9 * MAX_WAIT_S <= wait_s <= 1.5 * MAX_WAIT_S for _, wait_s in loop.refused)


def test_tenants_have_equal_parts_and_who_asks_little_does_not_wait(loop: Loop) -> None:
    carried = MAX_TURN_WORK / LONG_TURN_S
    rates = {"a": 10 * carried, "b": carried, "little": 0.1 * carried}
    _flood(loop, SETTLE_S, rates)
    for each in (loop.begun, loop.refused):
        each.clear()
    _flood(loop, 10, rates)
    served = Counter(loop.begun)
    assert served["a"] == pytest.approx(served["b"], rel=0.05)
    assert served["little"] == pytest.approx(0.1 * carried * 10, rel=0.05)
    assert "little" not in {tenant for tenant, _ in loop.refused}


def test_large_bodies_of_one_tenant_do_not_take_anothers_part(loop: Loop) -> None:
    order: list[str] = []
    while loop.queue.try_begin(1):
        pass
    for tenant, work in (("large", 16), ("small", 1)):
        for _ in range(64):
            loop.queue.wait(tenant, work, lambda tenant=tenant: order.append(tenant) or True)
    while "small" in loop.queue.waiting_by_tenant:
        loop.turn(0.01)
    assert order.count("small") == 64
    assert order.count("large") <= 5


def test_it_recovers_at_once_when_the_flood_is_over(loop: Loop) -> None:
    _flood(loop, 10, {"a": 10_000})
    assert loop.refused
    assert loop.queue.problem
    while loop.queue.waiting:
        loop.turn(0.04)
    loop.refused.clear()
    loop.turn(61)
    assert not loop.queue.problem
    for _ in range(200):
        loop.ask()
    while loop.queue.waiting:
        loop.turn(0.02)
    assert not loop.refused


def test_clients_that_leave_take_no_turn(loop: Loop) -> None:
    while loop.queue.try_begin(1):
        pass
    for _ in range(100):
        loop.queue.wait("a", 1, lambda: False)
    loop.ask()
    assert loop.turn(0.01) == 1
    assert not loop.queue.waiting


def test_work_of_bodies() -> None:
    assert work_of(0) == work_of(BYTES_PER_UNIT - 1) == 1
    assert work_of(BYTES_PER_UNIT) == 2
    assert work_of(2**40) == work_of(None) == MAX_REQUEST_WORK


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("ask"), st.sampled_from("abc"), st.integers(1, MAX_REQUEST_WORK)),
            st.tuples(st.just("turn"), st.floats(0, 3), st.just(0)),
        ),
        max_size=300,
    )
)
def test_whatever_comes(steps: list[tuple[str, object, int]]) -> None:
    loop, asked = Loop(), 0
    for what, value, work in steps:
        if what == "ask":
            asked += 1
            loop.ask(str(value), work)
        else:
            before = loop.queue.waiting
            began = loop.turn(float(str(value)))
            # An iteration begins at least one queued request, and at most the maximum work.
            assert bool(began) is bool(before)
            assert began <= MAX_TURN_WORK
        assert loop.queue.waiting == sum(loop.queue.waiting_by_tenant.values())
        assert asked == len(loop.begun) + len(loop.refused) + loop.queue.waiting
        assert all(n <= MAX_WAITING for n in loop.queue.waiting_by_tenant.values())
    while loop.queue.waiting:
        assert loop.turn(0.01)
    # The queue is empty: a new request begins at once, or the next iteration begins none.
    assert loop.queue.try_begin(1) or loop.turn(0.01) == 0


def test_who_fills_the_queue_leaves_others_their_part(loop: Loop) -> None:
    while loop.queue.try_begin(1):
        pass
    for _ in range(2 * MAX_WAITING):
        loop.ask("a")
    assert loop.queue.waiting == MAX_WAITING
    for _ in range(MAX_WAITING // 2):
        loop.ask("b")
    assert {tenant for tenant, _ in loop.refused} == {"a"}
    loop.ask("b")
    assert "b" in {tenant for tenant, _ in loop.refused}


def test_the_forecast_follows_a_pace_that_has_changed(loop: Loop) -> None:
    _flood(loop, 20, {"a": 5000}, turn_s=0.01)
    _flood(loop, SETTLE_S, {"a": 2000}, turn_s=0.04)
    loop.waited.clear()
    _flood(loop, 5, {"a": 2000}, turn_s=0.04)
    assert max(loop.waited) <= 1.4 * MAX_WAIT_S


def test_who_has_one_request_at_a_time_takes_no_more_than_its_part(loop: Loop) -> None:
    """A tenant that leaves the queue with each request and comes back gains no advantage."""
    work = Counter[str]()
    begun = 0
    for _ in range(200):
        for _ in range(MAX_TURN_WORK):
            loop.ask("b")
        loop.ask("a", MAX_REQUEST_WORK)
        loop.turn(0.02)
        for tenant in loop.begun[begun:]:
            work[tenant] += MAX_REQUEST_WORK if tenant == "a" else 1
        begun = len(loop.begun)
    assert work["b"] >= 0.8 * work["a"] > 0


def test_one_request_a_turn_begins_while_what_has_begun_is_late(loop: Loop) -> None:
    is_late = True
    loop.queue.yield_to(lambda: is_late)
    for _ in range(40):
        loop.ask()
    assert loop.begun == ["a"]
    assert [loop.turn(0.01) for _ in range(5)] == [1] * 5
    is_late = False
    assert [loop.turn(0.01) for _ in range(2)] == [MAX_TURN_WORK] * 2


def test_a_queue_that_ends_for_a_moment_is_no_new_burst(loop: Loop) -> None:
    """A queue that is empty for a moment during a flood does not count as a new burst.

    Requests of a burst may wait for two seconds, which is too long during a flood.
    """

    def flood() -> int:
        """Fill the queue, empty it in iterations of 20 ms, and return how many requests it held."""
        while not loop.refused:
            loop.ask()
        waiting = loop.queue.waiting
        while loop.queue.waiting:
            loop.turn(0.02)
        loop.refused.clear()
        return waiting

    first = flood()
    loop.turn(0.02)
    assert flood() <= 1.1 * MAX_STEADY_WAIT_S / 0.02 * MAX_TURN_WORK < first
    loop.turn(10.0)  # the flood is over
    assert flood() == first


def test_a_queue_refuses_while_much_more_is_asked_for_than_begins(loop: Loop) -> None:
    for _ in range(300):
        for _ in range(3 * MAX_TURN_WORK):
            loop.ask()
        loop.turn(LONG_TURN_S)
    assert loop.refused
    assert loop.queue.is_refusing
    while loop.queue.waiting:
        loop.turn(LONG_TURN_S)
    loop.turn(2.0)
    assert not loop.queue.is_refusing


async def test_tokens_are_gathered_while_the_queue_refuses_and_not_afterwards(loop: Loop) -> None:
    """The service connects the queue to the deliveries of tokens in the same event loop."""
    connect_to_deliveries(loop.queue)
    deliveries = delivery_queue()
    delivered = 0

    class Message:
        is_awaited = False

        def deliver(self) -> None:
            nonlocal delivered
            delivered += 1

    deliveries.add([Message()])
    assert delivered == 1
    while not loop.queue.is_refusing:
        for _ in range(3 * MAX_TURN_WORK):
            loop.ask()
        loop.turn(LONG_TURN_S)
    loop.turn(2.0)
    deliveries.add([Message()])  # finds that the queue refuses no more
    assert delivered == 2
    while not loop.queue.is_refusing:
        for _ in range(3 * MAX_TURN_WORK):
            loop.ask()
        loop.turn(LONG_TURN_S)
    deliveries.add([Message()])
    assert delivered == 2
    while delivered == 2:
        await asyncio.sleep(0)


def test_requests_that_look_expensive_do_not_make_the_queue_refuse(loop: Loop) -> None:
    """A few refusals of requests that look expensive do not make `is_refusing` true.

    While it is true, the gateway holds back other requests' tokens.
    """
    refusing = 0
    for number in range(1000):
        while loop.queue.waiting < 100:
            loop.ask()
        if number % 100 == 0:
            for _ in range(30):
                loop.ask("stranger", MAX_REQUEST_WORK)
        loop.turn(LONG_TURN_S)
        refusing += loop.queue.is_refusing
    assert any(tenant == "stranger" for tenant, _ in loop.refused)
    assert not refusing


def test_bursts_of_which_none_is_refused_may_follow_each_other(loop: Loop) -> None:
    """All streams begin if a program opens 300 of them again and again."""
    for _ in range(3):
        for _ in range(300):
            loop.ask()
        while loop.queue.waiting:
            loop.turn(2 * LONG_TURN_S)
        loop.turn(1.0)
    assert not loop.refused
