"""Reads that are delayed to gather tokens of many streams, without delaying other messages."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
import uvloop

from gateway.triton.http2.base_connection import _GATHER_S, BaseConnection
from gateway.triton.http2.channel import Http2Transport
from gateway.triton.transport import ConnectionOptions, Endpoint
from ops.local_stack.ports import LOCALHOST
from tests.support.authority import Authority
from tests.support.http2_peer import (
    MANY,
    Peer,
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

MB = 2**20


async def test_tokens_of_many_streams_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message is lost or assigned to another stream."""
    server = Server(silence)
    async with connect(server) as transport:
        calls = await begin_calls(transport, server)
        reads = await count_reads(monkeypatch, server.peers[0], calls, 600)
        assert reads < 200  # 300 if each message is read as soon as it arrives
        for n in range(600):
            assert await calls[n % MANY].read() == b"%d" % n


async def test_none_waits_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token waits for at most two pauses: the current one, and the one that its read begins."""
    assert _GATHER_S <= 0.002
    resumed = 0
    read_on = BaseConnection._resume_reading

    def counting(self: BaseConnection) -> None:
        nonlocal resumed
        resumed += 1
        read_on(self)

    monkeypatch.setattr(BaseConnection, "_resume_reading", counting)
    server = Server(silence)
    async with connect(server) as transport:
        calls = await begin_calls(transport, server)
        pauses = []
        for n in range(100):
            call = calls[n % MANY]
            unread, before = call.unread, resumed
            server.peers[0].send(call.stream_id, grpc_message(b"token"))
            await count_turns_until(lambda call=call, unread=unread: call.unread > unread)
            pauses.append(resumed - before)
        assert max(pauses) <= 2
        assert resumed > 0


@pytest.mark.parametrize(
    ("count", "uploads", "pause_s"), [(31, False, 0.0), (MANY, True, 0.0), (MANY, False, 0.01)]
)
async def test_else_a_message_is_read_at_once(count: int, uploads: bool, pause_s: float) -> None:
    """Reads are not delayed with few streams, during an upload, or if tokens are rare.

    An upload needs the server's window updates at once.
    """
    server = Server(silence)
    async with connect(server) as transport:
        calls = await begin_calls(transport, server, count)
        peer = server.peers[0]
        if uploads:
            server.acknowledges = False
            await start(transport, bytes(MB))
            await until(lambda: len(peer.requests.get(calls[-1].stream_id + 2, b"")) > 2**15)
            await asyncio.sleep(0.1)
        for n in range(100):
            await asyncio.sleep(pause_s)
            call = calls[n % count]
            before = call.unread
            peer.send(call.stream_id, grpc_message(b"token"))
            # This takes 2 iterations, and hundreds if the read is delayed.
            assert (
                await count_turns_until(lambda call=call, before=before: call.unread > before) < 10
            )


async def test_an_upload_does_not_wait_for_a_read_that_is_put_off() -> None:
    """The upload's second half needs a window update, which must be read without delay."""
    server = Server(silence)
    async with connect(server) as transport:
        calls = await begin_calls(transport, server)
        peer = server.peers[0]
        for n in range(10):
            for call in calls[:2]:
                before = call.unread
                peer.send(call.stream_id, grpc_message(b"token"))
                await count_turns_until(lambda call=call, before=before: call.unread > before)
            last = await start(transport, bytes(100_000))
            await count_turns_until(lambda n=n: len(peer.answered) == MANY + n)
            took = await count_turns_until(lambda n=n: len(peer.answered) == MANY + n + 1)
            assert took < 30
            last.cancel()


def test_what_has_come_over_tls_is_read_when_the_server_has_gone(tmp_path: Path) -> None:
    """Data that arrived over TLS is read even if the server closes the socket without close_notify.

    uvloop drops data that it has not passed on when the connection ends.
    """
    authority = Authority(tmp_path, "authority")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.issue("server"))
    context.set_alpn_protocols(["h2"])

    async def received(call: Any) -> int:
        count = 0
        while await call.read() is not None:
            count += 1
        return count

    async def run() -> list[int | BaseException]:
        server = Server(silence)
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(lambda: Peer(server), LOCALHOST, 0, ssl=context)
        endpoint = Endpoint.parse(f"grpcs://{LOCALHOST}:{listener.sockets[0].getsockname()[1]}")
        transport = Http2Transport(endpoint, ConnectionOptions(tls_ca=authority.file))
        calls = await begin_calls(transport, server)
        peer = server.peers[0]
        for n in range(MANY):
            peer.send(calls[n].stream_id, grpc_message(b"token"))
            await asyncio.sleep(0.0005)
        for call in calls:
            peer.send(call.stream_id, grpc_message(b"last"))
            peer.end(call.stream_id)
        own = peer.transport.get_extra_info("socket")
        with socket.socket(fileno=os.dup(own.fileno())) as below:
            below.shutdown(socket.SHUT_WR)
        found = await asyncio.gather(*[received(call) for call in calls], return_exceptions=True)
        await transport.close()
        listener.close()
        peer.transport.abort()
        await listener.wait_closed()
        return found

    for _ in range(5):
        assert uvloop.run(run()) == [2] * MANY
