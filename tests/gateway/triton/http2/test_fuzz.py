"""Fuzz tests of the HTTP/2 client: invalid frames, in any order and split anywhere.

No exception reaches the event loop, no call hangs, buffers stay within the windows, and calls raise
only errors of the gateway. The bytes are passed to the protocol without sockets, so thousands of
conversations take seconds.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from typing import Any

import pytest
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import GatewayError
from gateway.triton.http2 import frames
from gateway.triton.http2.call import WINDOW, RpcCall
from gateway.triton.http2.connection import Http2Connection
from gateway.triton.http2.headers import request_block
from tests.support.examples import scale_examples
from tests.support.http2_peer import HANGS_AFTER_S, grpc_message

BLOCK = request_block("/a/B", "h:1", tls=False)
CALLS = 3
# An upload of this size exceeds the first window, so one upload is always in progress.
UPLOAD = 100_000
GREETING = frames.settings([])


class Sink(asyncio.Transport):
    """A transport that stores what the client writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


def blocks() -> st.SearchStrategy[bytes]:
    """Generate header blocks: valid ones, ones with any fields, and random bytes."""
    names = st.sampled_from([":status", "content-type", "grpc-status", "grpc-message", "x"])
    values = st.sampled_from(
        ["200", "503", "100", "application/grpc", "0", "13", "-1", "²", "%4", "y" * 300]
    )
    pairs = st.lists(st.tuples(names, values), max_size=5)
    return st.one_of(
        st.just([(":status", "200"), ("content-type", "application/grpc")]).map(encoded),
        pairs.map(encoded),
        st.binary(max_size=40),
    )


def encoded(fields: list[tuple[str, str]]) -> bytes:
    return bytes(Encoder().encode(fields))


NUMBERS = st.one_of(
    st.sampled_from([0, 1, 2**14, 2**16, 2**24 - 1, 2**31 - 1, 2**31, 2**32 - 1]),
    st.integers(0, 2**32 - 1),
)
MESSAGES = st.one_of(
    st.lists(st.binary(max_size=30), max_size=4).map(lambda m: b"".join(map(grpc_message, m))),
    st.integers(0, 16_384).map(bytes),
    NUMBERS.map(lambda n: b"\0" + struct.pack(">I", n)),
    st.binary(max_size=40),
)
SETTINGS = st.lists(st.tuples(st.integers(0, 8), NUMBERS), max_size=3).map(
    lambda pairs: b"".join(struct.pack(">HI", *pair) for pair in pairs)
)
BODIES = {
    frames.DATA: MESSAGES,
    frames.HEADERS: blocks(),
    frames.CONTINUATION: blocks(),
    frames.SETTINGS: SETTINGS,
    frames.GOAWAY: st.tuples(NUMBERS, NUMBERS).map(lambda pair: struct.pack(">II", *pair)),
    frames.WINDOW_UPDATE: NUMBERS.map(lambda n: struct.pack(">I", n)),
    frames.RST_STREAM: NUMBERS.map(lambda n: struct.pack(">I", n)),
    frames.PING: st.just(b"12345678"),
}


@st.composite
def one_frame(draw: st.DrawFn) -> bytes:
    kind = draw(st.one_of(st.sampled_from(sorted(BODIES)), st.integers(0, 255)))
    body = draw(st.one_of(BODIES.get(kind, st.binary(max_size=20)), st.binary(max_size=20)))
    flags = draw(st.one_of(st.sampled_from([0, 1, 4, 5, 8]), st.integers(0, 255)))
    stream_id = draw(st.one_of(st.sampled_from([0, 1, 1, 3, 3, 5, 2, 7, 2**31 + 1]), NUMBERS))
    return frames.HEAD.pack(len(body) << 8 | kind, flags, stream_id) + body


@st.composite
def conversations(draw: st.DrawFn) -> list[bytes]:
    """Generate the data that a server sends, in the chunks that the socket returns."""
    begun = draw(st.booleans())
    sent = [GREETING] if begun or draw(st.booleans()) else []
    if begun:
        head = encoded([(":status", "200"), ("content-type", "application/grpc")])
        sent += [frames.frame(frames.HEADERS, frames.END_HEADERS, 1, head)]
    sent += draw(st.lists(one_frame(), max_size=12))
    data = bytearray(b"".join(sent))
    for at, value in draw(
        st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=2)
    ):
        if begun and at < len(data):
            data[at] = value
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [bytes(data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.slow
@given(conversations())
@scale_examples(10)
def test_any_conversation_ends_well(pieces: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        failed: list[object] = []
        logger = logging.getLogger("gateway.triton.http2.base_connection")
        patch.setattr(logger, "exception", failed.append)
        asyncio.run(converse(pieces))
    assert not failed


async def converse(pieces: list[bytes]) -> None:
    connection, sink = Http2Connection(lambda _: None), Sink()
    connection.connection_made(sink)
    calls = [RpcCall(connection, bytes) for _ in range(CALLS)]
    for n, call in enumerate(calls):
        body = bytes(UPLOAD if n == 1 else 10)
        connection.open(call, BLOCK, [body], len(body))
    opened = len(sink.written)
    readers = [asyncio.create_task(outcome(call)) for call in calls[:2]]
    received = 0
    for piece in pieces:
        if sink.closed:
            break
        received += len(piece)
        connection.data_received(piece)
        await asyncio.sleep(0)
    unread = calls[2]
    assert sum(map(len, unread._messages)) + unread._held_bytes <= WINDOW
    assert len(connection._rest) < frames.DEFAULT_MAX_FRAME + frames.HEAD_BYTES
    # The client's answers are not much longer than the data that they answer.
    assert len(sink.written) - opened <= 3 * received + UPLOAD * 2
    connection.connection_lost(None)
    readers.append(asyncio.create_task(outcome(unread)))
    for reader in readers:
        await asyncio.wait_for(reader, HANGS_AFTER_S)
    assert connection.idle


async def outcome(call: RpcCall[bytes]) -> None:
    try:
        while await call.read() is not None:
            pass
    except GatewayError:
        pass


@given(st.lists(st.binary(max_size=2000), min_size=1, max_size=8), st.data())
def test_messages_cut_into_any_frames_and_reads(messages: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(grpc_message, messages))
    places = st.lists(st.integers(0, len(stream)), max_size=10).map(sorted)
    head = encoded([(":status", "200"), ("content-type", "application/grpc")])
    wire = GREETING + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, head)
    for part in cut(stream, data.draw(places)):
        pad = data.draw(st.one_of(st.none(), st.integers(0, 255)))
        if pad is None:
            wire += frames.frame(frames.DATA, 0, 1, part)
        else:
            wire += frames.frame(frames.DATA, frames.PADDED, 1, bytes([pad]) + part + bytes(pad))
    end = encoded([("grpc-status", "0")])
    wire += frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, end)
    reads = cut(wire, data.draw(st.lists(st.integers(0, len(wire)), max_size=10).map(sorted)))

    async def receive() -> list[bytes | None]:
        connection, sink = Http2Connection(lambda _: None), Sink()
        connection.connection_made(sink)
        call = RpcCall(connection, bytes)
        connection.open(call, BLOCK, [b"x"], 1)
        for read in reads:
            connection.data_received(read)
        return [await call.read() for _ in range(len(messages) + 1)]

    assert asyncio.run(receive()) == [*messages, None]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


@pytest.mark.parametrize(
    "flood",
    [
        frames.frame(frames.PING, 0, 0, b"12345678"),
        frames.settings([]),
        frames.frame(frames.CONTINUATION, 0, 1, b"\x10\1a\1b" * 1000),
        frames.frame(frames.CONTINUATION, 0, 1, b""),
    ],
    ids=["PING", "SETTINGS", "CONTINUATION", "empty CONTINUATION"],
)
async def test_floods_end_the_connection(flood: bytes) -> None:
    connection, sink = Http2Connection(lambda _: None), Sink()
    connection.connection_made(sink)
    connection.data_received(GREETING)
    call = RpcCall(connection, bytes)
    connection.open(call, BLOCK, [b"x"], 1)
    if flood[3] == frames.CONTINUATION:
        connection.data_received(frames.frame(frames.HEADERS, 0, 1, b""))
    connection.pause_writing()  # the server does not read the answers, either
    for _ in range(2000):
        if connection.closed:
            break
        connection.data_received(flood)
    assert connection.closed
    with pytest.raises(GatewayError):
        await call.read()


async def test_a_server_that_ignores_the_window_of_a_stream() -> None:
    connection, sink = Http2Connection(lambda _: None), Sink()
    connection.connection_made(sink)
    head = encoded([(":status", "200"), ("content-type", "application/grpc")])
    connection.data_received(GREETING)
    calls = [RpcCall(connection, bytes) for _ in range(2)]
    for call in calls:
        connection.open(call, BLOCK, [b"x"], 1)
        block = frames.frame(frames.HEADERS, frames.END_HEADERS, call.stream_id, head)
        connection.data_received(block)
    message = frames.frame(frames.DATA, 0, 1, grpc_message(bytes(16_379)))
    for _ in range(WINDOW // 16_384 + 2):
        connection.data_received(message)
    assert sink.written.endswith(frames.rst_stream(1, frames.Code.FLOW_CONTROL_ERROR))
    for _ in range(WINDOW // 16_384):
        assert await calls[0].read() == bytes(16_379)
    with pytest.raises(GatewayError):
        await calls[0].read()
    connection.data_received(frames.frame(frames.DATA, 0, 3, grpc_message(b"on")))
    assert await calls[1].read() == b"on"
