"""Flow control in both directions: no window is exceeded, and no stream blocks another."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import uvloop
from h2.settings import SettingCodes
from hypothesis import given
from hypothesis import strategies as st

from gateway.triton.http2 import frames
from gateway.triton.http2.call import WINDOW
from gateway.triton.http2.connection import Http2Connection
from gateway.triton.http2.uploads import Uploads
from tests.support.http2_peer import (
    HANGS_AFTER_S,
    Peer,
    Server,
    connect,
    echo,
    grpc_message,
    silence,
    until,
)

PATH = "/a/B"
MB = 2**20


async def start(transport: Any, *pieces: bytes | memoryview) -> Any:
    return await transport.stream(PATH, pieces, bytes, {})


@pytest.mark.parametrize("window", [1, 7, 1000])
async def test_small_windows_of_the_server(window: int) -> None:
    """No byte is sent outside of a window: the `h2` server would raise an error."""
    server = Server(echo, initial_window_size=window)
    request = bytes(range(256)) * 4
    async with connect(server) as transport:
        calls = [await start(transport, request) for _ in range(3)]
        assert [await call.read() for call in calls] == [request] * 3


async def test_an_upload_waits_for_windows_and_survives_their_shrinking() -> None:
    server = Server(echo, initial_window_size=1000)
    server.acknowledges = False
    request = b"x" * 5000
    async with connect(server) as transport:
        call = await start(transport, request)
        peer = server.peers[0]
        await until(lambda: len(peer.requests.get(1, b"")) == 1000)
        peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 100})  # the window is now -900
        peer.h2.increment_flow_control_window(900, 1)  # the window is now 0
        peer.flush()
        await asyncio.sleep(0.05)
        assert len(peer.requests[1]) == 1000
        peer.h2.increment_flow_control_window(11, 1)
        peer.flush()
        await until(lambda: len(peer.requests[1]) == 1011)
        peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 5000})
        peer.flush()
        assert await call.read() == request


async def test_one_stuck_upload_holds_up_nobody() -> None:
    server = Server(echo)
    server.acknowledges = False
    async with connect(server) as transport:
        peer_stuck = asyncio.create_task((await start(transport, bytes(5 * MB))).read())
        peer = server.peers[0]
        # The default windows of the stream and of the connection are both 64 KiB.
        await until(lambda: len(peer.requests.get(1, b"")) == 2**16 - 1)
        peer.h2.increment_flow_control_window(MB)
        peer.flush()
        for n in range(20):
            call = await start(transport, b"small %d" % n)
            assert await asyncio.wait_for(call.read(), HANGS_AFTER_S) == b"small %d" % n
        assert len(peer.requests[1]) == 2**16 - 1
        peer_stuck.cancel()


async def test_uploads_take_turns_and_leave_room_for_the_small() -> None:
    """Two uploads of 32 MB advance together, and small calls are answered at once meanwhile."""
    server = Server(echo, initial_window_size=2**20, max_frame_size=2**16)
    weights = memoryview(bytearray(32 * MB))
    async with connect(server) as transport:
        await (await start(transport, b"hello")).read()
        peer = server.peers[0]
        large = [await start(transport, b"head", weights) for _ in range(2)]
        apart, answered = 0, 0
        while len(peer.requests) < 3 or len(peer.requests[3]) < weights.nbytes // 2:
            assert await (await start(transport, b"small")).read() == b"small"
            answered += 1
            apart = max(apart, abs(len(peer.requests[3]) - len(peer.requests[5])))
        assert answered >= 5
        assert apart <= 2 * MB
        for call in large:
            call.cancel()
        await until(lambda: peer.resets == {3: 8, 5: 8})
        assert await (await start(transport, b"small")).read() == b"small"


def test_a_flood_ends_the_turn_after_one_read() -> None:
    """The transport pauses after one read, as uvloop would read as long as data arrives.

    New connections would wait for seconds then.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    # frames of an unknown type, which are ignored
    unknown = frames.frame(0xFA, 0, 0, bytes(frames.DEFAULT_MAX_FRAME))
    sent = frames.settings([]) + unknown * 2000
    flood = threading.Thread(target=theirs.sendall, args=(sent,))

    async def run() -> list[int]:
        reads, left = [0], len(sent)

        class Counting(Http2Connection):
            def data_received(self, data: bytes) -> None:
                nonlocal left
                reads[-1] += 1
                left -= len(data)
                super().data_received(data)

        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: Counting(lambda _: None), sock=ours)
        flood.start()
        while left and not connection.closed:
            await asyncio.sleep(0)
            reads.append(0)
        assert not connection.closed
        connection.abort()
        return reads

    reads = uvloop.run(run())
    flood.join()
    theirs.close()
    listener.close()
    assert sum(reads) > 100
    assert max(reads) == 1


async def test_an_answer_before_the_end_of_the_request_ends_the_upload() -> None:
    server = Server(echo)
    server.acknowledges = False
    async with connect(server) as transport:
        call = await start(transport, bytes(MB))
        peer = server.peers[0]
        await until(lambda: 1 in peer.requests)
        peer.begin(1)
        peer.end(1, 0)
        assert await call.read() is None
        await until(lambda: peer.resets == {1: 8})
        peer.h2.increment_flow_control_window(MB)
        peer.flush()
        assert await (await start(transport, b"next")).read() == b"next"
        assert len(peer.requests[1]) <= 2**16


async def test_a_server_that_does_not_read_its_socket_fills_no_memory() -> None:
    server = Server(silence, initial_window_size=2**31 - 1)
    async with connect(server) as transport:
        await start(transport, b"x")
        peer = server.peers[0]
        peer.h2.increment_flow_control_window(2**30)
        peer.flush()
        await asyncio.sleep(0.05)
        peer.transport.pause_reading()
        await start(transport, memoryview(bytearray(64 * MB)))
        await asyncio.sleep(0.3)
        (connection,) = transport._connections
        assert 0 < connection._transport.get_write_buffer_size() < MB
        peer.transport.resume_reading()
        await until(lambda: len(peer.requests.get(3, b"")) > 64 * MB)


async def test_messages_longer_than_the_window() -> None:
    message = bytes(range(256)) * 20_000
    async with connect(Server(echo)) as transport:
        call = await start(transport, message)
        assert await call.read() == message
        assert await call.read() is None


async def test_a_slow_reader_slows_its_own_stream_only() -> None:
    """Unread messages stay at the server when the stream's window is full.

    Other streams continue.
    """
    message = grpc_message(b"x" * 1000)

    def answer(peer: Peer, stream_id: int) -> None:
        peer.begin(stream_id)
        count = 40_000 if bytes(peer.requests[stream_id]) == grpc_message(b"many") else 10
        peer.send_within_windows(stream_id, message * count, [("grpc-status", "0")])

    def enough(messages: Sequence[bytes]) -> bool:
        fed.extend(messages)
        return False

    fed: list[bytes] = []
    server = Server(answer)
    async with connect(server) as transport:
        slow = await start(transport, b"many")
        assert await slow.feed(enough)
        await until(lambda: server.peers and server.peers[0].unsent(1))
        await asyncio.sleep(0.1)
        left = server.peers[0].unsent(1)
        # Consumed bytes are returned to the window only when the reader wants more.
        assert fed
        assert left >= 40_000 * len(message) - WINDOW
        for _ in range(10):
            quick = await start(transport, b"few")
            assert [await quick.read() for _ in range(11)][-2:] == [b"x" * 1000, None]
        assert server.peers[0].unsent(1) == left
        count = 0
        while await slow.read() is not None:
            count += 1
        assert count + len(fed) == 40_000


async def test_answers_of_calls_that_have_ended_do_not_use_up_the_connection() -> None:
    """Data that arrives after a reset is dropped, but still returned to the connection's window."""
    server = Server(silence)
    async with connect(server) as transport:
        await start(transport, b"x")
        peer = server.peers[0]
        for n in range(60):
            call = await start(transport, b"x")
            stream_id = 2 * n + 3
            await until(lambda s=stream_id: s in peer.answered)
            # The data is sent before the server sees the reset. Its total exceeds the connection's
            # window.
            peer.send_within_windows(stream_id, bytes(MB - 100), None)
            assert peer.unsent(stream_id) == 0
            call.cancel()
            await until(lambda s=stream_id: s in peer.resets)


def test_a_window_that_was_taken_back_sends_nothing() -> None:
    uploads = Uploads()
    uploads.add(1, [bytes(50_000)])
    assert sum(map(len, uploads.frames(20_000))) == 2 * (16_384 + 9)
    uploads.set_initial(100)
    assert uploads.frames(20_000) == []
    assert uploads.widen(1, 40_000)
    assert sum(map(len, uploads.frames(1))) == 16_384 - 9_052 + 9


class Model:
    """`Uploads` beside a simple model of the same windows and bytes."""

    def __init__(self) -> None:
        self.uploads = Uploads()
        self.connection = self.default = 65_535
        self.windows: dict[int, int] = {}
        self.expected: dict[int, bytes] = {}
        self.sent: dict[int, bytearray] = {}

    def add(self, stream: int, amount: int) -> None:
        if stream not in self.expected:
            message = bytes([stream]) * (amount // 2) + b"!" * (amount - amount // 2)
            self.uploads.add(stream, [message[: amount // 3], memoryview(message)[amount // 3 :]])
            self.expected[stream], self.sent[stream] = message, bytearray()
            self.windows[stream] = self.default

    def widen(self, stream: int, amount: int) -> None:
        assert self.uploads.widen(stream, amount)
        if stream in self.windows:
            self.windows[stream] += amount

    def drop(self, stream: int, amount: int) -> None:
        unfinished = len(self.sent.get(stream, b"")) < len(self.expected.get(stream, b""))
        assert self.uploads.drop(stream) is unfinished
        for each in (self.expected, self.sent, self.windows):
            each.pop(stream, None)

    def widen_connection(self, stream: int, amount: int) -> None:
        self.uploads.widen_connection(amount)
        self.connection += amount

    def initial(self, stream: int, amount: int) -> None:
        self.uploads.set_initial(amount)
        for each in self.windows:
            self.windows[each] += amount - self.default
        self.default = amount

    def send(self, stream: int, amount: int) -> None:
        data = b"".join(self.uploads.frames(amount))
        while data:
            size, flags = int.from_bytes(data[:3], "big"), data[4]
            to = int.from_bytes(data[5:9], "big")
            self.sent[to] += data[9 : 9 + size]
            self.windows[to] -= size
            self.connection -= size
            assert 0 < size <= 16_384
            assert self.windows[to] >= 0
            assert self.connection >= 0
            assert bool(flags & 1) is (len(self.sent[to]) == len(self.expected[to]))
            data = data[9 + size :]


STEPS = st.tuples(
    st.sampled_from(["add", "widen", "drop", "widen_connection", "initial", "send", "send"]),
    st.integers(0, 5),
    st.integers(1, 150_000),
)


@given(st.lists(STEPS, max_size=60))
def test_uploads_against_a_plain_model(steps: list[tuple[str, int, int]]) -> None:
    """Windows are respected and bytes arrive in order, for any order of events."""
    model = Model()
    for step, stream, amount in steps:
        getattr(model, step)(stream, amount)
    model.widen_connection(0, 10**7)
    for stream in model.expected:
        model.widen(stream, 10**7)
    while model.uploads.has_ready():
        model.send(0, 100_000)
    assert model.sent == model.expected
