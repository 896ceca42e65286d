"""A scripted HTTP/2 server with `h2`, which checks strictly what a client sends."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings

from gateway.triton.http2.channel import Http2Transport
from gateway.triton.http2.connection import Http2Connection
from gateway.triton.transport import ConnectionOptions, Endpoint, Transport

Headers = list[tuple[str, str]]
HANGS_AFTER_S = 300.0
MANY = 40
"""Number of concurrent streams, so many that the client batches its reads."""
PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
OK: Headers = [(":status", "200"), ("content-type", "application/grpc")]


def grpc_message(payload: bytes, *, compressed: bool = False) -> bytes:
    return struct.pack(">BI", compressed, len(payload)) + payload


class Peer(asyncio.Protocol):
    """A server-side connection. Protocol errors of the client are in `violations`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        config = H2Configuration(client_side=False, header_encoding="utf-8")
        self.h2 = H2Connection(config)
        self.h2.local_settings = Settings(client=False, initial_values=server.settings)
        self.h2.max_inbound_frame_size = self.h2.local_settings.max_frame_size
        self.transport: Any = None
        self.events: list[Event] = []
        self.headers: dict[int, dict[str, str]] = {}
        self.requests: dict[int, bytearray] = {}
        """Received data of each request, with an entry from its headers on."""
        self.answered: list[int] = []
        """Streams whose request has arrived completely. grpc.aio may send one in several writes."""
        self.resets: dict[int, int] = {}
        self.closed = asyncio.Event()
        self._unsent: dict[int, tuple[bytearray, Headers | None]] = {}
        self._unheard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._server.peers.append(self)
        if self._server.greets:
            self.greet()

    def greet(self) -> None:
        """Send the connection preface late, and then handle the data received before."""
        self._server.greets = True
        self.h2.initiate_connection()
        self.flush()
        if self._unheard:
            self.data_received(b"")

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def data_received(self, data: bytes) -> None:
        self._unheard += data
        if not self._server.greets:
            return
        data, self._unheard = self._unheard, b""
        try:
            events = self.h2.receive_data(data)
        except ProtocolError as error:
            self._server.violations.append(error)
            self.flush()
            return
        for event in events:
            self._handle(event)
        self.flush()

    def _handle(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, RequestReceived):
            self.headers[event.stream_id] = dict(event.headers)  # type: ignore[arg-type]
            self.requests[event.stream_id] = bytearray()
        elif isinstance(event, DataReceived):
            self.requests[event.stream_id] += event.data
            if self._server.acknowledges:
                size = event.flow_controlled_length
                self.h2.acknowledge_received_data(size, event.stream_id)
        elif isinstance(event, StreamEnded):
            self._server.answer(self, event.stream_id)
            self.answered.append(event.stream_id)
        elif isinstance(event, StreamReset):
            self.resets[event.stream_id] = int(event.error_code)
            self._unsent.pop(event.stream_id, None)
        elif isinstance(event, WindowUpdated):
            self._send_unsent()
        elif isinstance(event, ConnectionTerminated):
            self.closed.set()

    def flush(self) -> None:
        self.transport.write(self.h2.data_to_send())

    def begin(self, stream_id: int, headers: Headers = OK) -> None:
        self.h2.send_headers(stream_id, headers)
        self.flush()

    def send(self, stream_id: int, data: bytes, **options: Any) -> None:
        self.h2.send_data(stream_id, data, **options)
        self.flush()

    def send_within_windows(self, stream_id: int, data: bytes, trailers: Headers | None) -> None:
        """Send as much as the flow control window allows, and the rest when the window grows."""
        self._unsent[stream_id] = (bytearray(data), trailers)
        self._send_unsent()

    def unsent(self, stream_id: int) -> int:
        return len(self._unsent[stream_id][0]) if stream_id in self._unsent else 0

    def _send_unsent(self) -> None:
        for stream_id, (data, trailers) in list(self._unsent.items()):
            while data and (window := self.h2.local_flow_control_window(stream_id)):
                size = min(window, self.h2.max_outbound_frame_size, len(data))
                self.h2.send_data(stream_id, bytes(data[:size]))
                del data[:size]
            if not data:
                del self._unsent[stream_id]
                if trailers is not None:
                    self.h2.send_headers(stream_id, trailers, end_stream=True)
        self.flush()

    def end(self, stream_id: int, status: int = 0, **more: str) -> None:
        trailers = [("grpc-status", str(status))]
        trailers += [(name.replace("_", "-"), value) for name, value in more.items()]
        self.h2.send_headers(stream_id, trailers, end_stream=True)
        self.flush()

    def reset(self, stream_id: int, code: int) -> None:
        self.h2.reset_stream(stream_id, ErrorCodes(code))
        self.flush()

    def goaway(self, last: int, code: int = 0) -> None:
        """Send GOAWAY as raw bytes, since h2 would treat the connection as closed."""
        payload = struct.pack(">II", last, code)
        self.transport.write(b"\0\0\x08\x07\0\0\0\0\0" + payload)


class Server:
    """A server that calls `answer` for each complete request."""

    def __init__(self, answer: Callable[[Peer, int], None], **settings: int) -> None:
        self.answer = answer
        self.settings = {SettingCodes[name.upper()]: value for name, value in settings.items()}
        self.peers: list[Peer] = []
        self.violations: list[ProtocolError] = []
        self.greets = True
        """True if the server sends its connection preface."""
        self.acknowledges = True
        """True if received DATA is acknowledged at once with a window update."""
        self.endpoint = ""


def echo(peer: Peer, stream_id: int) -> None:
    """Answer with the request's data."""
    peer.begin(stream_id)
    peer.send_within_windows(stream_id, bytes(peer.requests[stream_id]), [("grpc-status", "0")])


def silence(peer: Peer, stream_id: int) -> None:
    """Send only the response headers."""
    peer.begin(stream_id)


@contextlib.asynccontextmanager
async def listening(server: Server, port: int = 0) -> AsyncIterator[Server]:
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: Peer(server), "127.0.0.1", port)
    server.endpoint = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for peer in server.peers:
            peer.transport.abort()
        await listener.wait_closed()
    assert server.violations == []


@contextlib.asynccontextmanager
async def connect(server: Server) -> AsyncIterator[Http2Transport]:
    """Yield a transport to `server`, which listens while the context is open."""
    async with listening(server):
        transport = Http2Transport(Endpoint.parse(server.endpoint), ConnectionOptions())
        try:
            async with asyncio.timeout(HANGS_AFTER_S):
                yield transport
        finally:
            await transport.close()


async def until(condition: Callable[[], Any], within_s: float = HANGS_AFTER_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)


async def start(transport: Transport, *pieces: bytes, **metadata: str) -> Any:
    """Start a call whose request has these pieces."""
    return await transport.stream(PATH, pieces or [b"x"], bytes, metadata)


async def begin_calls(transport: Any, server: Server, count: int = MANY) -> list[Any]:
    """Return `count` calls whose answers have started. A call's `unread` counts its messages."""
    calls = [await start(transport) for _ in range(count)]
    await until(lambda: len(server.peers[0].answered) == count)
    # Reads of the headers must not be counted as reads of a token.
    await asyncio.sleep(0.1)
    return calls


async def count_reads(
    monkeypatch: pytest.MonkeyPatch, peer: Peer, calls: Sequence[Any], messages: int
) -> int:
    """Return the number of reads in which the client receives `messages`.

    The peer sends the messages round robin to the calls, each in its own packet, in quick
    succession.
    """
    reads = 0
    received = Http2Connection.data_received

    def counting(self: Http2Connection, data: bytes) -> None:
        nonlocal reads
        reads += 1
        received(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(Http2Connection, "data_received", counting)
        before = sum(call.unread for call in calls)
        for n in range(messages):
            peer.send(calls[n % len(calls)].stream_id, grpc_message(b"%d" % n))
            await asyncio.sleep(0)
        await until(lambda: sum(call.unread for call in calls) == before + messages)
    return reads


async def count_turns_until(condition: Callable[[], Any]) -> int:
    """Return the number of event loop iterations until the condition is true."""
    turns = 0
    while not condition():
        await asyncio.sleep(0)
        turns += 1
    return turns
