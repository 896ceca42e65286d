"""Abandoned calls, with `h2` as the server: who ends them, and when."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from gateway.triton.grpcio import GrpcioTransport
from gateway.triton.http2.call import WINDOW
from gateway.triton.http2.channel import Http2Transport
from gateway.triton.http2.connection import ABANDONED_ALLOWANCE_BYTES
from gateway.triton.transport import ConnectionOptions, Endpoint
from tests.support.event_clock import EventClock
from tests.support.http2_peer import (
    HANGS_AFTER_S,
    Peer,
    Server,
    connect,
    echo,
    grpc_message,
    listening,
    silence,
    start,
    until,
)


async def test_what_is_left_ends_as_the_server_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.triton.http2.connection.ABANDON_GRACE_S", HANGS_AFTER_S)
    server = Server(silence)
    async with connect(server) as transport:
        calls = [await start(transport) for _ in range(3)]
        readers = [asyncio.create_task(call.read()) for call in calls[:2]]
        await until(lambda: len(server.peers[0].answered) == 3)
        peer = server.peers[0]
        await asyncio.sleep(0.02)
        calls[0].abandon()
        calls[0].abandon()
        with pytest.raises(asyncio.CancelledError):
            await readers[0]
        with pytest.raises(asyncio.CancelledError):
            await calls[0].read()
        calls[2].abandon()
        # The client still receives data and ends of abandoned streams.
        peer.send(1, grpc_message(b"dropped"))
        peer.end(1)
        peer.end(5)
        peer.send(3, grpc_message(b"still here"))
        assert await readers[1] == b"still here"
        peer.end(3)
        assert await calls[1].read() is None
        assert all(connection.idle for connection in transport._connections)
        assert peer.resets == {}


@pytest.mark.parametrize("make", [Http2Transport, GrpcioTransport])
async def test_what_the_server_does_not_end_in_time_is_reset(
    monkeypatch: pytest.MonkeyPatch, make: type[Http2Transport | GrpcioTransport]
) -> None:
    def grace(seconds: float) -> None:
        for module in ("http2.connection", "grpcio"):
            monkeypatch.setattr(f"gateway.triton.{module}.ABANDON_GRACE_S", seconds)

    grace(HANGS_AFTER_S)
    async with listening(Server(silence)) as server:
        transport = make(Endpoint.parse(server.endpoint), ConnectionOptions())
        ends = await start(transport)
        # Wait: during the connection setup grpc.aio may send the second of two calls first.
        await until(lambda: server.peers and len(server.peers[0].answered) == 1)
        does_not = await start(transport)
        await until(lambda: len(server.peers[0].answered) == 2)
        told: dict[str, bool] = {}
        ends.abandon(partial(told.__setitem__, "ends"))
        peer, resets = server.peers[0], server.peers[0].resets
        peer.send(1, grpc_message(b"dropped"))
        peer.end(1)
        # A later call is answered, so the client has seen the end of the stream.
        server.answer = echo
        assert await transport.unary("/a/Unary", b"x", HANGS_AFTER_S) == b"x"
        assert resets == {}
        await until(lambda: told == {"ends": True})
        grace(0.05)
        does_not.abandon(partial(told.__setitem__, "does not"))
        await until(lambda: resets == {3: 8})
        await until(lambda: told == {"ends": True, "does not": False})
        await transport.close()


async def test_one_left_too_many_is_reset_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.triton.http2.connection.MAX_ABANDONED", 2)
    server = Server(silence)
    async with connect(server) as transport:
        calls = [await start(transport) for _ in range(4)]
        await until(lambda: len(server.peers[0].answered) == 4)
        told: dict[int, bool] = {}
        for number, call in enumerate(calls):
            call.abandon(partial(told.__setitem__, number))
        await until(lambda: server.peers[0].resets == {5: 8, 7: 8})
        assert told == {2: False, 3: False}
    assert told == dict.fromkeys(range(4), False)  # the connection is closed


async def test_what_had_ended_when_it_was_left_is_told_at_once() -> None:
    server = Server(silence)
    async with connect(server) as transport:
        calls = [await start(transport) for _ in range(2)]
        await until(lambda: len(server.peers[0].answered) == 2)
        server.peers[0].end(1)
        await until(lambda: calls[0].status is not None)
        told: list[bool] = []
        calls[0].abandon(told.append)
        assert told == [True]
        calls[1].cancel()
        calls[1].abandon(told.append)
        assert told == [True]


async def test_a_request_that_is_left_half_written_is_reset() -> None:
    server = Server(silence)
    server.acknowledges = False
    async with connect(server) as transport:
        call = await start(transport, bytes(2**20))
        await until(lambda: bool(server.peers[0].requests))
        call.abandon()
        await until(lambda: server.peers[0].resets == {1: 8})


async def test_what_is_left_behind_a_full_window_ends_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.triton.http2.connection.ABANDON_GRACE_S", HANGS_AFTER_S)
    answer = grpc_message(bytes(2**18 - 5)) * 20

    def flood(peer: Peer, stream_id: int) -> None:
        peer.begin(stream_id)
        peer.send_within_windows(stream_id, answer, [("grpc-status", "0")])

    server = Server(flood)
    async with connect(server) as transport:
        call = await start(transport)
        assert await call.read() is not None
        # The server has stopped sending, because its window is full and nothing is read.
        await until(lambda: call.window == 0)
        call.abandon()
        await until(lambda: all(connection.idle for connection in transport._connections))
        assert server.peers[0].unsent(1) == 0
        assert server.peers[0].resets == {}


async def test_what_is_left_does_not_drain_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    grace_s = HANGS_AFTER_S / 2
    monkeypatch.setattr("gateway.triton.http2.connection.ABANDON_GRACE_S", grace_s)
    clock = EventClock()
    answer = bytes(ABANDONED_ALLOWANCE_BYTES + 2 * WINDOW)

    def flood(peer: Peer, stream_id: int) -> None:
        peer.begin(stream_id)
        peer.send_within_windows(stream_id, answer, None)

    unsent: list[int] = []
    server = Server(flood)
    async with connect(server) as transport:
        call = await start(transport)
        await until(lambda: server.peers and server.peers[0].unsent(1))
        peer = server.peers[0]
        call.abandon()

        def drained() -> bool:
            unsent.append(peer.unsent(1))
            return bool(peer.resets)

        # Wait until most data is drained, however long it takes. The clock's leap then ends the
        # grace period.
        await until(lambda: peer.unsent(1) <= WINDOW)
        await clock.leap_once(lambda: bool(unsent), until(drained), grace_s)
        assert peer.resets == {1: 8}
        assert min(left for left in unsent if left) == WINDOW
