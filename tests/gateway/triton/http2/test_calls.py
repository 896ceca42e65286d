"""Single calls of the HTTP/2 transport, with `h2` as the server: requests, messages and ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from gateway.errors import (
    EngineBroken,
    EngineError,
    EngineUnavailable,
    GatewayError,
)
from gateway.triton.grpcio import GrpcioTransport
from gateway.triton.http2.channel import Http2Transport
from gateway.triton.transport import ConnectionOptions, Endpoint, Transport
from tests.support.http2_peer import (
    HANGS_AFTER_S,
    OK,
    PATH,
    Headers,
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


async def everything(call: Any) -> list[bytes]:
    messages = []
    while (message := await call.read()) is not None:
        messages.append(message)
    return messages


async def test_what_a_request_looks_like() -> None:
    server = Server(echo)
    async with connect(server) as transport:
        call = await start(transport, b"one", memoryview(b"two"), b"", traceparent="00-ab-cd-01")
        assert await everything(call) == [b"onetwo"]
        (peer,) = server.peers
        assert peer.headers[1] == {
            ":method": "POST",
            ":scheme": "http",
            ":path": PATH,
            ":authority": server.endpoint,
            "te": "trailers",
            "content-type": "application/grpc",
            "user-agent": "triton-openai-gateway",
            "traceparent": "00-ab-cd-01",
        }
        assert peer.requests[1] == grpc_message(b"onetwo")
        assert await transport.unary("/a/Unary", b"", 62.5) == b""
        assert peer.headers[3]["grpc-timeout"] == "62500m"
        assert len(server.peers) == 1


async def test_long_metadata_and_metadata_of_every_call() -> None:
    async with listening(Server(echo)) as server:
        options = ConnectionOptions(metadata={"triton-grpc-protocol-key": "v" * 300})
        transport = Http2Transport(Endpoint.parse(server.endpoint), options)
        await everything(await start(transport, other="w" * 127))
        await transport.close()
        assert server.peers[0].headers[1]["triton-grpc-protocol-key"] == "v" * 300
        assert server.peers[0].headers[1]["other"] == "w" * 127


@pytest.mark.parametrize(
    "metadata",
    [
        {"Name": "x"},
        {":path": "x"},
        {"a": "b\r\nc: d"},
        {"a": "ä"},
        {"a-bin": "x"},
        {"grpc-x": ""},
        {"a": "x" * 9000},
    ],
)
async def test_metadata_that_grpc_does_not_allow(metadata: dict[str, str]) -> None:
    async with connect(Server(echo)) as transport:
        with pytest.raises(ValueError, match="metadata"):
            await start(transport, **metadata)


def in_frames(*frames: tuple[bytes, dict[str, Any]]) -> Callable[[Peer, int], None]:
    def answer(peer: Peer, stream_id: int) -> None:
        peer.begin(stream_id)
        for data, options in frames:
            peer.send(stream_id, data, **options)
        peer.end(stream_id)

    return answer


async def test_messages_and_frames_need_not_agree() -> None:
    long = bytes(range(256)) * 300
    data = b"".join(map(grpc_message, [b"a", b"", b"bc", long, b"d"]))
    cuts = [0, 3, 5, 6, 11, 12, 20, 21, 20_000, 50_000, *range(50_001, 50_010), len(data)]
    pieces = [
        data[start : min(start + 16_384, end)]
        for begin, end in itertools.pairwise(cuts)
        for start in range(begin, end, 16_384)
    ]
    frames = [(piece, {"pad_length": 7} if len(piece) < 9 else {}) for piece in pieces]
    frames.insert(3, (b"", {}))
    async with connect(Server(in_frames(*frames))) as transport:
        assert await everything(await start(transport)) == [b"a", b"", b"bc", long, b"d"]


class Taker:
    """A consumer that stores each list of messages, and returns False at call number `enough`."""

    def __init__(self, enough: int = 1_000_000) -> None:
        self.enough = enough
        self.fed: list[list[bytes]] = []

    def __call__(self, messages: Sequence[bytes]) -> bool:
        self.fed.append([*messages])
        return len(self.fed) < self.enough


async def test_what_has_come_together_is_fed_together() -> None:
    both = grpc_message(b"1") + grpc_message(b"2")
    async with connect(Server(in_frames((both, {}), (grpc_message(b"3"), {})))) as transport:
        call = await start(transport)
        assert await call.read() == b"1"
        await until(lambda: call.status is not None)
        taker = Taker()
        assert await call.feed(taker) is False
        assert taker.fed == [[b"2", b"3"]]
        assert await call.read() is None


@pytest.mark.parametrize("make", [Http2Transport, GrpcioTransport])
async def test_feeding_stops_when_asked_and_goes_on_where_it_stopped(
    make: type[Http2Transport | GrpcioTransport],
) -> None:
    server = Server(silence)
    async with listening(server):
        transport = make(Endpoint.parse(server.endpoint), ConnectionOptions())
        call = await start(transport)
        taker = Taker(enough=2)
        feeding = asyncio.create_task(call.feed(taker))
        await until(lambda: server.peers and server.peers[0].answered)
        (peer,) = server.peers
        for n in range(2):
            peer.send(1, grpc_message(b"%d" % n))
            await until(lambda n=n: len(taker.fed) > n)
        assert await feeding is True
        peer.send(1, grpc_message(b"2"))
        peer.end(1, 14, grpc_message="gone")
        taker.enough = 1_000_000
        with pytest.raises(EngineUnavailable):
            await call.feed(taker)
        assert taker.fed == [[b"0"], [b"1"], [b"2"]]
        await transport.close()


async def test_what_a_taker_raises_ends_nothing_but_its_own_feeding() -> None:
    server = Server(silence)
    async with connect(server) as transport:
        calls = [await start(transport) for _ in range(2)]
        takers = [Taker(), Taker()]

        def fails(messages: Sequence[bytes]) -> bool:
            raise EngineError(f"{takers[0](messages)}")

        feeding = [
            asyncio.create_task(calls[0].feed(fails)),
            asyncio.create_task(calls[1].feed(takers[1])),
        ]
        await until(lambda: server.peers and len(server.peers[0].answered) == 2)
        (peer,) = server.peers
        for stream_id in (1, 3, 1, 3):
            peer.h2.send_data(stream_id, grpc_message(b"x"))
        peer.flush()
        with pytest.raises(EngineError, match="True"):
            await feeding[0]
        await until(lambda: sum(map(len, takers[1].fed)) == 2)
        calls[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await feeding[1]
        assert sum(map(len, takers[1].fed)) == 2


def trailers_only(*fields: tuple[str, str]) -> Callable[[Peer, int], None]:
    def answer(peer: Peer, stream_id: int) -> None:
        peer.h2.send_headers(stream_id, [*fields], end_stream=True)

    return answer


def after_one(end: Callable[[Peer, int], None], headers: Headers = OK) -> Any:
    def answer(peer: Peer, stream_id: int) -> None:
        peer.begin(stream_id, headers)
        peer.send(stream_id, grpc_message(b"first"))
        end(peer, stream_id)

    return answer


def ending(status: int, message: str = "") -> Any:
    return after_one(lambda peer, stream: peer.end(stream, status, grpc_message=message))


def resetting(code: int) -> Any:
    return after_one(lambda peer, stream: peer.reset(stream, code))


DEAD = "Stub%20process 'm_%C3%A4%zz' is not healthy."
ENDINGS: dict[str, tuple[Any, type[GatewayError]]] = {
    "dead": (ending(13, DEAD), EngineUnavailable),
    "internal": (ending(13, "boom"), EngineBroken),
    "away": (ending(14), EngineUnavailable),
    "unknown": (ending(2), EngineUnavailable),
    "cancelled": (ending(1), EngineUnavailable),
    "deadline": (ending(4), EngineUnavailable),
    "exhausted": (ending(8, "too large"), EngineError),
    "a status of the future": (ending(99, "?"), EngineUnavailable),
    "no status": (
        after_one(lambda p, s: p.h2.send_headers(s, [("a", "b")], end_stream=True)),
        EngineUnavailable,
    ),
    "no number": (
        after_one(lambda p, s: p.h2.send_headers(s, [("grpc-status", "x")], end_stream=True)),
        EngineBroken,
    ),
    "no trailers": (after_one(lambda p, s: p.send(s, b"", end_stream=True)), EngineUnavailable),
    "trailers only": (trailers_only(*OK, ("grpc-status", "13")), EngineBroken),
    "compressed": (
        after_one(lambda p, s: p.send(s, grpc_message(b"x", compressed=True))),
        EngineBroken,
    ),
    "503": (trailers_only((":status", "503"), ("content-type", "text/html")), EngineUnavailable),
    "403": (trailers_only((":status", "403"), ("content-type", "text/html")), EngineBroken),
    "reset: no error": (resetting(0), EngineBroken),
    "reset: internal": (resetting(2), EngineBroken),
    "reset: refused": (resetting(7), EngineUnavailable),
    "reset: cancel": (resetting(8), EngineUnavailable),
    "reset: calm": (resetting(11), EngineError),
}


async def until_the_end(call: Any) -> tuple[list[bytes], GatewayError | None]:
    messages: list[bytes] = []
    try:
        while (message := await call.read()) is not None:
            messages.append(message)
    except GatewayError as error:
        return messages, error
    return messages, None


@pytest.mark.parametrize("name", ENDINGS)
async def test_failures_are_those_of_grpc(name: str) -> None:
    """Both transports raise the same error for each way that a call ends."""
    answer, expected = ENDINGS[name]
    first = [] if answer.__qualname__.startswith("trailers_only") else [b"first"]
    for make in (Http2Transport, GrpcioTransport):
        async with listening(Server(answer)) as server:
            transport: Transport = make(Endpoint.parse(server.endpoint), ConnectionOptions())
            call = await start(transport)
            messages, error = await asyncio.wait_for(until_the_end(call), HANGS_AFTER_S)
            assert type(error) is expected, make
            # grpc.aio drops messages that have arrived if a reset follows immediately.
            assert messages == first or make is GrpcioTransport
            await transport.close()


async def test_a_stream_that_ends_within_a_message() -> None:
    """A stream that ends within a message is broken, even if its status is OK.

    grpc.aio drops the incomplete message and reports success.
    """
    server = Server(after_one(lambda p, s: (p.send(s, b"\0\0\0\0\5ab"), p.end(s))))
    async with connect(server) as transport:
        messages, error = await until_the_end(await start(transport))
        assert messages == [b"first"]
        assert type(error) is EngineBroken


async def test_an_answer_that_is_not_grpc() -> None:
    headers = [(":status", "200"), ("content-type", "text/html")]
    async with connect(Server(lambda p, s: p.begin(s, headers))) as transport:
        with pytest.raises(EngineUnavailable):
            await (await start(transport)).read()


async def test_informational_headers_are_not_the_answer() -> None:
    def answer(peer: Peer, stream_id: int) -> None:
        peer.begin(stream_id, [(":status", "103")])
        echo(peer, stream_id)

    async with connect(Server(answer)) as transport:
        assert await everything(await start(transport, b"abc")) == [b"abc"]


async def test_a_message_longer_than_triton_may_send() -> None:
    server = Server(after_one(lambda p, s: p.send(s, b"\0\x80\0\0\0")))
    async with connect(server) as transport:
        call = await start(transport)
        assert await call.read() == b"first"
        with pytest.raises(EngineError):
            await call.read()
        await until(lambda: server.peers[0].resets == {1: 8})


async def test_cancelling_resets_one_stream_and_no_other() -> None:
    server = Server(silence)
    async with connect(server) as transport:
        calls = [await start(transport) for _ in range(3)]
        readers = [asyncio.create_task(call.read()) for call in calls]
        await until(lambda: len(server.peers[0].answered) == 3)
        await asyncio.sleep(0.02)
        peer = server.peers[0]
        calls[1].cancel()
        calls[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await readers[1]
        with pytest.raises(asyncio.CancelledError):
            await calls[1].read()
        await until(lambda: peer.resets == {3: 8})
        for stream_id in (1, 5):
            peer.send(stream_id, grpc_message(b"still here"))
        assert [await readers[0], await readers[2]] == [b"still here"] * 2


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    server = Server(silence)
    async with connect(server) as transport:
        call = await start(transport)
        await until(lambda: server.peers[0].answered)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await call.read()
        server.peers[0].send(1, grpc_message(b"late"))
        assert await call.read() == b"late"


async def test_unary_deadline() -> None:
    server = Server(echo)
    async with connect(server) as transport:
        # Connect first, as the time to connect counts against the deadline.
        await transport.unary("/a/B", b"", HANGS_AFTER_S)
        server.answer = silence
        with pytest.raises(TimeoutError):
            await transport.unary("/a/B", b"", 0.1)
        await until(lambda: server.peers[0].resets == {3: 8})
    async with connect(Server(trailers_only(*OK, ("grpc-status", "4")))) as transport:
        with pytest.raises(TimeoutError):
            await transport.unary("/a/B", b"", HANGS_AFTER_S)


@pytest.mark.parametrize("count", [0, 2])
async def test_a_unary_call_has_one_answer(count: int) -> None:
    frames = [(grpc_message(b"x"), {})] * count
    async with connect(Server(in_frames(*frames))) as transport:
        with pytest.raises(EngineError):
            await transport.unary("/a/B", b"", HANGS_AFTER_S)
