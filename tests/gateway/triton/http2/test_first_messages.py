"""Priority of messages that a task waits for, beside many other streams."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from gateway.triton.http2.deliveries import DeliveryQueue
from tests.support.http2_peer import (
    MANY,
    Server,
    begin_calls,
    connect,
    count_reads,
    count_turns_until,
    grpc_message,
    silence,
    start,
    until,
)

STREAMS = 200


class Turns:
    """A counter of event loop iterations inside a ``with`` block."""

    def __init__(self) -> None:
        self.now = 0

    def __enter__(self) -> Turns:
        self._handle = asyncio.get_running_loop().call_soon(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.cancel()

    def _count(self) -> None:
        self.now += 1
        self._handle = asyncio.get_running_loop().call_soon(self._count)


def send_together(peer: Any, calls: Sequence[Any], message: bytes = b"token") -> None:
    """Send a message to each of `calls`, all in one write."""
    for call in calls:
        peer.h2.send_data(call.stream_id, grpc_message(message))
    peer.flush()


@asynccontextmanager
async def feeding(calls: Sequence[Any], take: Callable[[int], bool]) -> AsyncIterator[None]:
    """Feed `take` the call's number for each message of a call. Cancel the calls at the end."""
    tasks = [asyncio.create_task(call.feed(lambda _, n=n: take(n))) for n, call in enumerate(calls)]
    await asyncio.sleep(0)
    yield
    for call in calls:
        call.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_awaited_message_is_read_at_once_beside_many_streams() -> None:
    """Reads are not delayed while a task waits for a message. The current delay ends at once."""
    server = Server(silence)
    async with connect(server) as transport:
        calls = await begin_calls(transport, server)
        peer = server.peers[0]
        for number in range(10):
            for call in calls[:3]:
                before = call.unread
                peer.send(call.stream_id, grpc_message(b"token"))
                await count_turns_until(lambda call=call, before=before: call.unread > before)
            new = await start(transport)
            reading = asyncio.create_task(new.read())
            # This takes 3 iterations, and hundreds if the read is delayed.
            assert await count_turns_until(lambda n=number: len(peer.answered) == MANY + n + 1) < 10
            for call in calls[:3]:
                before = call.unread
                peer.send(call.stream_id, grpc_message(b"token"))
                took = await count_turns_until(
                    lambda call=call, before=before: call.unread > before
                )
                assert took < 10
            peer.send(new.stream_id, grpc_message(b"first"))
            assert await count_turns_until(reading.done) < 10
            assert reading.result() == b"first"
            peer.end(new.stream_id)
            assert await new.read() is None


async def test_reads_are_gathered_again_when_no_task_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reads are delayed again after a wait.

    The waits here end with a message, the stream's end, a failure and a cancellation.
    """
    server = Server(silence)
    async with connect(server) as transport:
        calls = await begin_calls(transport, server)
        peer = server.peers[0]
        others = [await start(transport) for _ in range(5)]
        tasks = [asyncio.create_task(call.read()) for call in others]
        await until(lambda: len(peer.answered) == MANY + 5)
        peer.send(others[0].stream_id, grpc_message(b"token"))
        peer.end(others[1].stream_id)
        peer.end(others[2].stream_id, 13)
        peer.reset(others[3].stream_id, 8)
        tasks[4].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        reads = await count_reads(monkeypatch, peer, calls, 600)
        assert reads < 200  # 300 if each message is read as soon as it arrives


@pytest.mark.parametrize(("waits", "most"), [(False, 16), (True, 4)])
async def test_tokens_that_were_read_together_are_delivered_over_many_turns(
    waits: bool, most: int
) -> None:
    """Each iteration delivers a few messages, and fewer while a task waits for its message.

    While more than 64 messages are queued, each iteration delivers one more per 64 of them.
    """
    delivered: Counter[int] = Counter()
    server = Server(silence)
    async with connect(server) as transport:
        calls = await begin_calls(transport, server, STREAMS)
        peer = server.peers[0]
        with Turns() as turns:

            def take(_: int) -> bool:
                delivered[turns.now] += 1
                return True

            async with feeding(calls, take):
                waiting = asyncio.create_task((await start(transport)).read())
                if not waits:
                    waiting.cancel()
                await until(lambda: len(peer.answered) == STREAMS + 1)
                send_together(peer, calls)
                await until(lambda: delivered.total() == STREAMS)
                waiting.cancel()
        # All 200 would be delivered at once without the queue.
        assert max(delivered.values()) <= most + STREAMS // 64


async def test_a_task_that_waits_is_woken_before_what_was_read_with_its_message() -> None:
    server = Server(silence)
    async with connect(server) as transport:
        calls = await begin_calls(transport, server, STREAMS)
        peer = server.peers[0]
        delivered = 0

        def take(_: int) -> bool:
            nonlocal delivered
            delivered += 1
            return True

        before: list[int] = []

        async def wait() -> None:
            assert await calls[-1].read() == b"token"
            before.append(delivered)

        async with feeding(calls[:-1], take):
            waiting = asyncio.create_task(wait())
            await asyncio.sleep(0)
            # The awaited message is the last in both writes, whether or not they are read together.
            send_together(peer, calls[:-1])
            send_together(peer, calls)
            await waiting
            assert before[0] < 20  # 398 if the other messages go first
            await until(lambda: delivered >= STREAMS - 1)
        calls[-1].cancel()


async def test_each_stream_has_its_messages_once_and_in_order() -> None:
    """Some streams are fed, some are read, and some change between the two."""
    server = Server(silence)
    rounds = 30
    async with connect(server) as transport:
        calls = await begin_calls(transport, server, MANY)
        peer = server.peers[0]
        got: list[list[bytes]] = [[] for _ in calls]

        async def consume(number: int) -> None:
            call, own = calls[number], got[number]
            while len(own) < rounds:
                if (number + len(own)) % 3 == 0:
                    own.append(await call.read())
                    continue
                limit = len(own) + 1 + number % 4

                def take(messages: Sequence[bytes], own: Any = own, limit: int = limit) -> bool:
                    assert messages
                    own.extend(messages)
                    return len(own) < min(limit, rounds)

                await call.feed(take)

        tasks = [asyncio.create_task(consume(n)) for n in range(MANY)]
        for n in range(rounds):
            send_together(peer, calls, b"%d" % n)
            for _ in range(n % 5):
                await asyncio.sleep(0)
        await asyncio.gather(*tasks)
        assert got == [[b"%d" % n for n in range(rounds)]] * MANY


async def test_a_server_that_sends_fast_is_read_no_faster_than_messages_are_delivered() -> None:
    """Undelivered data stays below two large reads, instead of a full window per stream."""
    size, most = 8000, 0
    server = Server(silence)
    async with connect(server) as transport:
        calls = await begin_calls(transport, server, STREAMS)
        peer = server.peers[0]
        delivered = 0

        def take(_: int) -> bool:
            nonlocal delivered, most
            delivered += 1
            most = max(most, sum(call.unread for call in calls) * size)
            return True

        async with feeding(calls, take):
            for _ in range(10):
                send_together(peer, calls, bytes(size))
            await until(lambda: sum(call.unread for call in calls) == 0 and delivered >= STREAMS)
        assert most < 2**20


class Delivery:
    is_awaited = False

    def __init__(self, turns: Turns, delivered: list[int]) -> None:
        self._turns, self._delivered = turns, delivered

    def deliver(self) -> None:
        self._delivered.append(self._turns.now)


class Clock:
    """A clock that advances by `turn_s` per loop iteration, and by `each_s` per delivery."""

    def __init__(self, turns: Turns, turn_s: float, each_s: float) -> None:
        self._turns, self._turn_s, self._each_s = turns, turn_s, each_s
        self.delivered = list[int]()

    def __call__(self) -> float:
        return self._turns.now * self._turn_s + len(self.delivered) * self._each_s


@pytest.mark.parametrize("turn_s", [0.0001, 0.001, 0.01])
async def test_late_deliveries_get_most_of_the_loop(turn_s: float) -> None:
    """Late tokens are delivered by time, as a flood of requests makes iterations long.

    A fixed number of deliveries per iteration would starve tokens.
    """
    each_s, count = 0.00002, 5000
    with Turns() as turns:
        clock = Clock(turns, turn_s, each_s)
        queue = DeliveryQueue(clock)
        queue.waits = 1  # a waiting request must not slow late tokens down
        over = asyncio.Event()
        queue.add([Delivery(turns, clock.delivered) for _ in range(count)])
        assert not clock.delivered
        queue.call_after(over.set)
        await over.wait()
        assert len(clock.delivered) == count
        late_at_s, most_rest_s = 0.02, 0.0025
        besides = turn_s / (6 * min(turn_s, most_rest_s))
        assert clock() < late_at_s + 4 * turn_s + count * each_s * 1.1 * (1 + besides)
        assert not queue.is_late or turn_s < late_at_s


async def test_messages_are_late_once_they_have_waited_for_long() -> None:
    with Turns() as turns:
        clock = Clock(turns, 0.001, 0.00002)
        queue = DeliveryQueue(clock)
        over = asyncio.Event()
        queue.add([Delivery(turns, clock.delivered) for _ in range(2000)])
        queue.call_after(over.set)
        while not queue.is_late:
            assert not over.is_set()
            await asyncio.sleep(0)
        assert clock() >= 0.02
        await over.wait()
        begun_at = turns.now
        while queue.is_late:
            await asyncio.sleep(0)
        assert turns.now - begun_at <= 21


async def test_batches_that_are_delivered_in_time_are_never_late() -> None:
    """A stream of quick batches is no lateness, however short the queue is empty between them."""
    with Turns() as turns:
        clock = Clock(turns, 0.001, 0.00002)
        queue = DeliveryQueue(clock)
        for number in range(1, 31):
            queue.add([Delivery(turns, clock.delivered) for _ in range(120)])
            while len(clock.delivered) < 120 * number:
                assert not queue.is_late
                await asyncio.sleep(0)


async def test_messages_wait_since_their_connection_paused_reading() -> None:
    """Messages may have been in the socket since then, so they are late sooner than they seem."""
    with Turns() as turns:
        clock = Clock(turns, 0.001, 0.00002)
        queue = DeliveryQueue(clock)
        loop = asyncio.get_running_loop()
        paused_at = queue.now()

        def read() -> None:
            queue.add([Delivery(turns, clock.delivered) for _ in range(1000)], paused_at)

        queue.add([Delivery(turns, clock.delivered) for _ in range(160)])
        queue.call_after(lambda: loop.call_soon(read))  # 10 iterations later
        while not queue.is_late:
            await asyncio.sleep(0)
        assert len(clock.delivered) > 160
        assert clock() < 0.03


async def test_a_pause_counts_for_the_next_read_of_its_connection_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, since = Server(silence), list[float | None]()
    add = DeliveryQueue.add

    def record(queue: DeliveryQueue, calls: Any, paused_at: float | None = None) -> None:
        since.append(paused_at)
        add(queue, calls, paused_at)

    monkeypatch.setattr(DeliveryQueue, "add", record)
    async with connect(server) as transport:
        calls = await begin_calls(transport, server, STREAMS)
        got = Counter[int]()

        def take(number: int) -> bool:
            got[number] += 1
            return True

        async with feeding(calls, take):
            send_together(server.peers[0], calls, bytes(8000))  # several large reads
            await until(lambda: got.total() == STREAMS)
            assert since[0] is None
            assert any(paused_at is not None for paused_at in since)
            for number in (1, 2):
                send_together(server.peers[0], calls[:1])
                await until(lambda number=number: got.total() == STREAMS + number)
            assert since[-1] is None


async def test_messages_wait_for_others_of_their_stream_while_requests_are_refused() -> None:
    """Held messages are delivered by a timer of the real loop, and by nothing else in this test."""
    is_overloaded, hold_s = True, 0.04
    queue, over, delivered = DeliveryQueue(), asyncio.Event(), list[int]()
    queue.gather_while(lambda: is_overloaded)
    loop = asyncio.get_running_loop()
    with Turns() as turns:

        class Awaited(Delivery):
            is_awaited = True

        awaited = list[int]()
        for number in range(3):
            is_overloaded = True
            begun_at = loop.time()
            queue.waits = 1
            queue.add([Delivery(turns, delivered), Awaited(turns, awaited)])
            # delivered at once; its later turn in the queue then has nothing left to deliver
            assert len(awaited) == 2 * number + 1
            queue.waits = 0
            is_overloaded = False
            queue.add([Delivery(turns, delivered)])
            assert len(delivered) == 2 * number
            queue.call_after(over.set)  # the connection continues to read
            await over.wait()
            assert len(delivered) == 2 * number
            over.clear()
            while len(delivered) < 2 * number + 2:
                await asyncio.sleep(0)
            assert loop.time() - begun_at >= hold_s - 0.002
            assert not queue.is_late
        queue.add([Delivery(turns, delivered)])
        assert len(delivered) == 7


async def test_many_large_reads_end_a_hold() -> None:
    queue, over, delivered = DeliveryQueue(), asyncio.Event(), list[int]()
    queue.gather_while(lambda: True)
    with Turns() as turns:
        queue.add([Delivery(turns, delivered) for _ in range(3)])
        for _ in range(9):
            assert not delivered
            queue.call_after(over.set)
        for _ in range(2):
            await asyncio.sleep(0)
        assert len(delivered) == 3


async def test_an_error_of_one_delivery_does_not_keep_the_others() -> None:
    class Failing(Delivery):
        def deliver(self) -> None:
            raise RuntimeError

    told = list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    queue, delivered = DeliveryQueue(), list[int]()
    with Turns() as turns:
        queue.add([Failing(turns, []), *[Delivery(turns, delivered) for _ in range(40)]])
        for _ in range(20):
            await asyncio.sleep(0)
    assert len(delivered) == 40
    assert [type(context["exception"]) for context in told] == [RuntimeError]


async def test_a_callback_comes_in_another_turn_where_nothing_waits() -> None:
    queue, called = DeliveryQueue(), asyncio.Event()
    queue.call_after(called.set)
    assert not called.is_set()
    await called.wait()
