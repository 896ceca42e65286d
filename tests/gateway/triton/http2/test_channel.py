"""Connections of the HTTP/2 transport: when they are opened, given up and replaced."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
import struct
import threading
import time
import weakref
from contextvars import ContextVar
from typing import Any

import pytest
import uvloop

from gateway.errors import EngineUnavailable
from gateway.triton.http2 import channel
from gateway.triton.http2.channel import Http2Transport
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
    until,
)


async def start(transport: Any, request: bytes = b"x") -> Any:
    return await transport.stream("/a/B", [request], bytes, {})


def to(server: Server) -> Http2Transport:
    return Http2Transport(Endpoint.parse(server.endpoint), ConnectionOptions())


async def test_one_connection_for_all() -> None:
    async with connect(Server(echo)) as transport:
        calls = await asyncio.gather(*[start(transport, b"%d" % n) for n in range(50)])
        assert [await call.read() for call in calls] == [b"%d" % n for n in range(50)]
        assert len(transport._connections) == 1


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_connection_keeps_nothing_of_the_request_that_opened_it(loop: Any) -> None:
    """A connection drops the context of the request that opened it.

    The connection outlives the request, and its later log lines do not belong to the request.
    """

    class Request: ...

    of_whom: ContextVar[Request] = ContextVar("of_whom")

    async def ask(transport: Any) -> weakref.ref[Request]:
        request = Request()
        of_whom.set(request)
        call = await start(transport)
        assert [await call.read(), await call.read()] == [b"x", None]
        return weakref.ref(request)

    async def run() -> None:
        async with connect(Server(echo)) as transport:
            request = await asyncio.create_task(ask(transport))
            await until(lambda: gc.collect() >= 0 and request() is None)
            assert len(transport._connections) == 1

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


async def test_more_connections_when_one_is_full_and_fewer_afterwards() -> None:
    server = Server(silence, max_concurrent_streams=2)
    async with connect(server) as transport:
        calls = await asyncio.gather(*[start(transport) for _ in range(5)])
        await until(lambda: sum(len(peer.answered) for peer in server.peers) == 5)
        assert [len(peer.answered) for peer in server.peers] == [2, 2, 1]
        calls[0].cancel()
        await start(transport)
        assert len(server.peers) == 3
        for call in calls[1:]:
            call.cancel()
        await until(lambda: sum(peer.closed.is_set() for peer in server.peers) == 2)


def test_a_server_that_resets_each_connection_is_away() -> None:
    """A reset at any moment, also while connecting, means that the server is unavailable."""

    async def run() -> None:
        for _ in range(400):
            transport = Http2Transport(Endpoint.parse(endpoint), ConnectionOptions())
            call = asyncio.create_task(start(transport))
            await asyncio.sleep(0)
            time.sleep(0.002)
            with pytest.raises(EngineUnavailable):
                await call
            await transport.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
        threading.Thread(target=_reset, args=(server,), daemon=True).start()
        uvloop.run(run())
        server.shutdown(socket.SHUT_RDWR)


def _reset(server: socket.socket) -> None:
    at_once = struct.pack("ii", 1, 0)
    with contextlib.suppress(OSError):  # the socket is closed at the end of the test
        while True:
            connection, _ = server.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            connection.close()


async def test_a_server_that_takes_no_streams_is_away() -> None:
    async with connect(Server(echo, max_concurrent_streams=0)) as transport:
        with pytest.raises(EngineUnavailable):
            await start(transport)


async def test_goaway_lets_what_runs_finish() -> None:
    server = Server(silence)
    async with connect(server) as transport:
        calls = [await start(transport) for _ in range(3)]
        first = server.peers[0]
        await until(lambda: len(first.answered) == 3)
        first.goaway(2**31 - 1)
        first.goaway(3)
        with pytest.raises(EngineUnavailable):
            await calls[2].read()  # the server did not process stream 5
        later = await start(transport)
        await until(lambda: len(server.peers) == 2 and server.peers[1].answered)
        for stream_id, call in ((1, calls[0]), (3, calls[1])):
            first.send(stream_id, grpc_message(b"to the end"))
            first.end(stream_id)
            assert await call.read() == b"to the end"
            assert await call.read() is None
        await until(first.closed.is_set)
        server.peers[1].send(1, grpc_message(b"new"))
        assert await later.read() == b"new"


async def test_goaway_of_an_idle_connection_closes_it() -> None:
    server = Server(echo)
    async with connect(server) as transport:
        await (await start(transport)).read()
        server.peers[0].goaway(1, code=11)
        await until(server.peers[0].closed.is_set)
        assert await (await start(transport, b"again")).read() == b"again"
        assert len(server.peers) == 2


async def test_a_lost_connection_fails_its_calls_and_is_renewed() -> None:
    server = Server(silence)
    async with connect(server) as transport:
        calls = [await start(transport) for _ in range(3)]
        await until(lambda: len(server.peers[0].answered) == 3)
        readers = [asyncio.create_task(call.read()) for call in calls[:2]]
        await asyncio.sleep(0)
        server.peers[0].transport.abort()
        for failing in (*readers, calls[2].read()):
            with pytest.raises(EngineUnavailable):
                await failing
        server.answer = echo
        assert await (await start(transport, b"again")).read() == b"again"


async def test_closing_fails_what_runs() -> None:
    server = Server(silence)
    async with listening(server):
        transport = to(server)
        call = await start(transport)
        await transport.close()
        with pytest.raises(EngineUnavailable):
            await call.read()
        with pytest.raises(EngineUnavailable):
            await start(transport)
        await until(server.peers[0].closed.is_set)


async def test_nobody_waits_for_a_server_that_is_away() -> None:
    server = Server(echo)
    async with listening(server):
        pass
    port = int(server.endpoint.rpartition(":")[2])
    transport, loop = to(server), asyncio.get_running_loop()
    begun = loop.time()
    for _ in range(100):
        with pytest.raises(EngineUnavailable):
            await start(transport)
    # Only the first call of each pause connects. The other calls fail at once. The shortest pause
    # is 80 ms.
    assert transport._failures <= 1 + (loop.time() - begun) / 0.08
    async with listening(server, port):
        async with asyncio.timeout(HANGS_AFTER_S):
            while True:
                try:
                    call = await start(transport, b"back")
                    break
                except EngineUnavailable:
                    await asyncio.sleep(0.05)
        assert await call.read() == b"back"
        assert transport._failures == 0
    await transport.close()


async def test_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first calls wait for the server's settings until a timeout. Later calls fail at once."""
    monkeypatch.setattr(channel, "CONNECT_TIMEOUT_S", HANGS_AFTER_S)
    clock = EventClock()
    server = Server(echo)
    server.greets = False
    async with listening(server):
        transport = to(server)
        calls = [asyncio.create_task(start(transport)) for _ in range(5)]
        await clock.leap_once(lambda: bool(server.peers), asyncio.wait(calls))
        assert all(isinstance(call.exception(), EngineUnavailable) for call in calls)
        assert len(server.peers) == 1
        await until(server.peers[0].closed.is_set)
        # After the pause one call connects again. Calls that arrive meanwhile fail at once.
        loop = asyncio.get_running_loop()
        await until(lambda: loop.time() >= transport._retry_at)
        trying = asyncio.create_task(start(transport))
        await until(lambda: transport._dial_task)
        with pytest.raises(EngineUnavailable):
            await start(transport)
        assert not trying.done()
        await transport.close()
        with pytest.raises(EngineUnavailable):
            await trying


async def test_giving_up_while_connecting_leaves_the_others() -> None:
    server = Server(echo)
    server.greets = False
    async with connect(server) as transport:
        calls = [asyncio.create_task(start(transport, b"%d" % n)) for n in range(3)]
        await until(lambda: server.peers)
        calls[0].cancel()
        await asyncio.sleep(0)
        server.peers[0].greet()
        assert [await (await call).read() for call in calls[1:]] == [b"1", b"2"]


async def test_closing_while_connecting() -> None:
    server = Server(echo)
    server.greets = False
    async with listening(server):
        transport = to(server)
        call = asyncio.create_task(start(transport))
        await until(lambda: server.peers)
        await transport.close()
        await asyncio.wait([call], timeout=HANGS_AFTER_S)
        assert isinstance(call.exception(), EngineUnavailable)
        await until(server.peers[0].closed.is_set)


@pytest.mark.parametrize(
    "greeting",
    [
        b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n",
        b"\0\0\x08\x06\0\0\0\0\0pingpong",
        b"\0\0\0\4\1\0\0\0\0",
        b"\0\0\6\4\0\0\0\0\0\0\4\xff\xff\xff\xff",
        b"\0\0\5\4\0\0\0\0\0\0\0\0\0\0",
    ],
    ids=["HTTP/1.1", "no settings", "an ack", "endless window", "broken settings"],
)
async def test_what_is_not_http2_is_away(greeting: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read()
        writer.close()

    listener = await asyncio.start_server(greet, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    transport = Http2Transport(Endpoint.parse(f"127.0.0.1:{port}"), ConnectionOptions())
    with caplog.at_level(logging.WARNING), pytest.raises(EngineUnavailable):
        await asyncio.wait_for(start(transport), HANGS_AFTER_S)
    assert "broke the HTTP/2 protocol" in caplog.text
    await transport.close()
    listener.close()
    await listener.wait_closed()


async def test_pings_are_answered_and_unknown_frames_are_not() -> None:
    server = Server(echo)
    async with connect(server) as transport:
        await (await start(transport)).read()
        peer = server.peers[0]
        peer.transport.write(b"\0\0\3\xee\0\0\0\0\0abc" + b"\0\0\5\2\0\0\0\0\1\0\0\0\0\0")
        peer.h2.ping(b"12345678")
        peer.flush()
        await until(lambda: any(type(e).__name__ == "PingAckReceived" for e in peer.events))
        assert await (await start(transport, b"on")).read() == b"on"


async def test_a_header_block_in_many_frames() -> None:
    def answer(peer: Peer, stream_id: int) -> None:
        echo(peer, stream_id)

    def long(peer: Peer, stream_id: int) -> None:
        fields = [(f"x-{n}", "v" * 1000) for n in range(40)]
        peer.begin(stream_id, [(":status", "200"), ("content-type", "application/grpc"), *fields])
        peer.end(stream_id, 14, grpc_message="%41")

    server = Server(long)
    async with connect(server) as transport:
        with pytest.raises(EngineUnavailable):
            await (await start(transport)).read()
        server.answer = answer
        assert await (await start(transport, b"on")).read() == b"on"
        assert len(server.peers) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("localhost:8001", Endpoint("localhost", 8001, False, "localhost")),
        ("grpcs://triton.example:443", Endpoint("triton.example", 443, True, "triton.example")),
        ("grpcs://10.0.0.1:443#triton", Endpoint("10.0.0.1", 443, True, "triton")),
        ("[::1]:8001", Endpoint("::1", 8001, False, "::1")),
    ],
)
def test_endpoints(text: str, expected: Endpoint) -> None:
    assert Endpoint.parse(text) == expected
    assert expected.authority in text


@pytest.mark.parametrize(
    "text", ["", "host", ":1", "host:", "host:0", "host:65536", "http://h:1", "h:1/x", "h:-1"]
)
def test_what_is_no_endpoint(text: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        Endpoint.parse(text)
