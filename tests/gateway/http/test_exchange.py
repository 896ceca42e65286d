"""Conversion of an ASGI application's messages to HTTP, or to an error if they are invalid."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from gateway.api.failures import build_response
from gateway.http.connections import Connections
from gateway.http.exchange import EXCHANGE, MAX_UNREAD_BYTES, App
from gateway.http.protocol import ConnectionLimits, HttpProtocol

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
Send = Callable[[dict[str, Any]], Awaitable[None]]


@contextlib.asynccontextmanager
async def connected(
    app: App,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, ServerState]]:
    """Yield the reader and writer of a client, and the state of a server that runs `app`."""
    state, loop = ServerState(), asyncio.get_running_loop()

    def protocol() -> HttpProtocol:
        return HttpProtocol(
            uvicorn.Config(app),
            state,
            {"made": "at the start"},
            app=app,
            limits=ConnectionLimits(idle=2),
            connections=Connections(8),
            build_error=build_response,
        )

    async with await loop.create_server(protocol, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer, state
        finally:
            writer.close()
            for connection in list(state.connections):
                connection.transport.abort()
            while state.connections or state.tasks:
                await asyncio.sleep(0)


async def _asked(app: App, request: bytes = GET) -> bytes:
    """Send a request. Return all bytes until the server closes the connection."""
    async with connected(app) as (reader, writer, _), asyncio.timeout(300):
        writer.write(request)
        return await reader.read()


def _saying(*headers: tuple[bytes, bytes], pieces: list[bytes], status: int = 200) -> App:
    async def app(_scope: Any, _receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for number, piece in enumerate(pieces, 1):
            more = number < len(pieces)
            await send({"type": "http.response.body", "body": piece, "more_body": more})

    return app


async def test_a_body_longer_than_was_said() -> None:
    told = await _asked(_saying((b"content-length", b"3"), pieces=[b"fo", b"ur"]))
    assert told.endswith(b"\r\n\r\nfo")


NONE_IN_HTTP = {
    "longer": _saying((b"content-length", b"3"), pieces=[b"four"]),
    "shorter": _saying((b"content-length", b"9"), pieces=[b"four"]),
    "two lengths": _saying((b"content-length", b"3"), (b"Content-Length", b"4"), pieces=[b"four"]),
    "signed length": _saying((b"content-length", b"+4"), pieces=[b"four"]),
    "two headers in a value": _saying((b"a", b"b\r\nset-cookie: c"), pieces=[b"four"]),
    "two headers in a name": _saying((b"a: b\r\nset-cookie", b"c"), pieces=[b"four"]),
    "space in a name": _saying((b"set-cookie ", b"c"), pieces=[b"four"]),
    "no name": _saying((b"", b"c"), pieces=[b"four"]),
    "1xx": _saying(pieces=[b"four"], status=101),
    "no status": _saying(pieces=[b"four"], status=1000),
}


@pytest.mark.parametrize("name", NONE_IN_HTTP)
@pytest.mark.parametrize("request_", [GET, GET.replace(b"GET", b"HEAD")])
async def test_what_is_no_answer_in_http_is_an_error(name: str, request_: bytes) -> None:
    """An invalid answer becomes a complete 500. A partial one would make clients retry or hang."""
    if request_ != GET and name in ("longer", "shorter"):
        return  # an answer without a body may announce any length
    told = await _asked(NONE_IN_HTTP[name], request_)
    head, _, body = told.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert b"connection: close" in head
    assert b"set-cookie" not in told
    assert b"four" not in told
    assert (body == b"") == (request_ != GET)


async def test_messages_that_are_none_of_an_answer() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.trailers", "headers": []})

    assert (await _asked(app)).startswith(b"HTTP/1.1 500 ")


async def test_where_an_answer_ends_is_not_for_the_application_to_say() -> None:
    """The server sets the transfer coding and sends names in lower case, as ASGI demands."""
    said = (b"Content-Length", b"4"), (b"Transfer-Encoding", b"gzip"), (b"X-A", b"b")
    told = await _asked(_saying(*said, (b"Connection", b"Close"), pieces=[b"four"]))
    first, *lines = told.split(b"\r\n")
    assert first == b"HTTP/1.1 200 OK"
    assert lines == [b"content-length: 4", b"x-a: b", b"connection: close", b"", b"four"]


async def test_a_status_that_has_no_name() -> None:
    told = await _asked(_saying((b"connection", b"close"), pieces=[b"x"], status=499))
    assert told.startswith(b"HTTP/1.1 499 \r\n")


async def test_a_client_of_old_http_gets_no_chunks() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        exchange = scope["extensions"][EXCHANGE]
        await send({"type": "http.response.start", "status": 200})
        exchange.write(b"one")
        assert exchange.write_chunk(b"two")
        exchange.end(b"three")

    head, _, body = (await _asked(app, b"GET / HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [b"HTTP/1.1 200 OK", b"connection: close"]
    assert body == b"onetwothree"


async def test_a_piece_behind_the_end_is_in_no_other_answer() -> None:
    late: list[Callable[[bytes], bool]] = []

    async def app(scope: Any, receive: Any, send: Send) -> None:
        for write in late:
            write(b"late")
        late.append(scope["extensions"][EXCHANGE].write_chunk)
        await _saying(pieces=[b"x"])(scope, receive, send)

    async with connected(app) as (reader, writer, _), asyncio.timeout(300):
        for _ in range(2):
            writer.write(GET)
            told = await reader.readuntil(b"0\r\n\r\n")
            assert told.startswith(b"HTTP/1.1 200 ")
            assert b"late" not in told


async def test_each_request_has_a_copy_of_what_was_made_at_the_start() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        assert scope["state"] == {"made": "at the start"}
        scope["state"]["of"] = "this request"
        await _saying(pieces=[b"x"])(scope, receive, send)

    async with connected(app) as (reader, writer, _), asyncio.timeout(300):
        for _ in range(2):
            writer.write(GET)
            assert b" 200 " in await reader.readuntil(b"0\r\n\r\n")


async def test_spaces_behind_a_value_are_none_of_it() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        assert (b"a", b"b c") in scope["headers"]
        body = (await receive())["body"]
        await _saying(pieces=[body])(scope, receive, send)

    async with connected(app) as (reader, writer, _), asyncio.timeout(300):
        writer.write(POST + b"a:  b c \t \r\nexpect: 100-continue \r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"body")
        assert b"body" in await reader.readuntil(b"0\r\n\r\n")


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("whole", [True, False])
async def test_a_last_answer_before_the_body_is_not_lost(version: bytes, whole: bool) -> None:
    """The server delays the close, because a close with unread data would lose the answer."""
    size = 20_000_000

    async def app(scope: Any, receive: Any, send: Send) -> None:
        if not whole:
            raise ValueError
        await _saying((b"content-length", b"2"), pieces=[b"no"], status=413)(scope, receive, send)

    request = b"POST / HTTP/%b\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    async with connected(app) as (reader, writer, _), asyncio.timeout(300):
        writer.write(request % (version, size))
        for _ in range(20):
            writer.write(b"x" * (size // 20))
            await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 413 " if whole else b"HTTP/1.1 500 ")


async def test_who_gives_way_unread_is_told_so() -> None:
    began = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Send) -> None:
        gone = asyncio.Event()
        scope["extensions"][EXCHANGE].on_disconnect = gone.set
        began.set()
        await gone.wait()

    async def upload(writer: asyncio.StreamWriter) -> None:
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 20000000\r\n\r\n")
        writer.write(b"x" * 20_000_000)
        await writer.drain()

    async with connected(app) as (reader, writer, state), asyncio.timeout(300):
        sent = asyncio.create_task(upload(writer))
        await began.wait()
        [connection] = state.connections
        assert isinstance(connection, HttpProtocol)
        while connection.transport.is_reading():
            await asyncio.sleep(0)
        assert not sent.done()
        connection.evict()
        assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
        await sent


async def test_what_nobody_wants_of_a_body_has_its_time_once() -> None:
    async with connected(_saying((b"content-length", b"0"), pieces=[b""])) as (
        reader,
        writer,
        state,
    ):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n")
        [connection] = state.connections
        assert isinstance(connection, HttpProtocol)
        for _ in range(60):
            writer.write(b"x" * 10_000)
            await writer.drain()
            connection.check()
        assert not connection.transport.is_closing()
        connection.check()
        assert connection.transport.is_closing()


async def test_an_answer_is_not_lost_with_the_requests_behind_it() -> None:
    async with connected(_saying((b"content-length", b"0"), pieces=[b""])) as (reader, writer, _):
        async with asyncio.timeout(300):
            writer.write(GET * 500_000)
            await writer.drain()
            told = await reader.read()
    assert told == b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


async def test_nothing_behind_the_last_body_is_read() -> None:
    asked: list[str] = []

    async def app(scope: Any, receive: Any, send: Send) -> None:
        asked.append(scope["path"])
        await _saying((b"content-length", b"0"), pieces=[b""])(scope, receive, send)

    async with connected(app) as (reader, writer, _), asyncio.timeout(300):
        writer.write(POST + b"connection: close\r\n\r\nbo")
        assert await reader.readuntil(b"\r\n\r\n")
        writer.write(b"dy" + GET)
        assert await reader.read() == b""
    assert asked == ["/"]


async def test_a_client_that_leaves_with_its_body_unread_is_seen_to_leave() -> None:
    """The server notices a disconnect only while it reads, so it reads on after a complete body."""
    gone = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Send) -> None:
        scope["extensions"][EXCHANGE].on_disconnect = gone.set
        await gone.wait()

    async with connected(app) as (_, writer, _), asyncio.timeout(300):
        size = MAX_UNREAD_BYTES + 1
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
        writer.write(b"x" * size)
        await writer.drain()
        writer.close()
        await gone.wait()


async def test_no_answer_is_an_error_in_the_envelope() -> None:
    async def app(*_: Any) -> None:
        return

    head, _, body = (await _asked(app)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert json.loads(body)["error"]["type"] == "server_error"


async def test_what_the_connection_answers_itself_says_what_every_answer_says() -> None:
    """Errors that the connection itself sends have the common headers, such as the request id."""

    async def app(scope: Any, receive: Any, send: Send) -> None:
        scope["extensions"][EXCHANGE].headers.append((b"x-request-id", b"mine"))
        while (await receive())["type"] == "http.request":
            pass

    chunked = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with connected(app) as (reader, writer, state), asyncio.timeout(300):
        writer.write(chunked)
        while not state.tasks:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        writer.write(b"no size\r\n")
        told = await reader.read()
    assert told.startswith(b"HTTP/1.1 400 ")
    assert told.count(b"x-request-id") == told.count(b"x-request-id: mine\r\n") == 1


async def test_half_an_answer_has_no_end() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"half", "more_body": True})
        raise ValueError

    told = await _asked(app)
    assert told.endswith(b"\r\n\r\n4\r\nhalf\r\n")


async def test_what_every_answer_says_and_pieces_past_the_middlewares() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        exchange = scope["extensions"][EXCHANGE]
        exchange.headers.append((b"a", b"b"))
        exchange.keep_alive = False
        await send({"type": "http.response.start", "status": 200})
        exchange.write(b"one")
        assert exchange.write_chunk(b"two")
        exchange.end(b"")

    head, _, body = (await _asked(app)).partition(b"\r\n\r\n")
    assert {b"a: b", b"transfer-encoding: chunked", b"connection: close"} <= {*head.split(b"\r\n")}
    assert body == b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"


@pytest.mark.parametrize(("method", "status"), [(b"HEAD", 200), (b"GET", 204), (b"GET", 304)])
async def test_answers_without_a_body(method: bytes, status: int) -> None:
    request = b"%b / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % method
    told = await _asked(_saying(pieces=[b"none"], status=status), request)
    assert told.endswith(b"\r\n\r\n")
    assert b"chunked" not in told


async def test_a_body_is_asked_for_where_its_client_waits() -> None:
    async def app(scope: Any, receive: Any, send: Send) -> None:
        body = (await receive())["body"]
        await _saying(pieces=[body])(scope, receive, send)

    async with connected(app) as (reader, writer, _), asyncio.timeout(300):
        writer.write(POST + b"expect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"body")
        assert (await reader.readuntil(b"0\r\n\r\n")).endswith(b"4\r\nbody\r\n0\r\n\r\n")


async def test_a_client_that_leaves_is_told_of_once() -> None:
    told: list[str] = []
    gone = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Send) -> None:
        scope["extensions"][EXCHANGE].on_disconnect = lambda: told.append("at once")
        while (message := await receive())["type"] != "http.disconnect":
            told.append(message["type"])
        told.append(message["type"])
        gone.set()

    async with connected(app) as (_, writer, _), asyncio.timeout(300):
        writer.write(POST + b"\r\nbo")
        writer.close()
        await gone.wait()
    assert told in (
        ["http.request", "at once", "http.disconnect"],
        ["at once", "http.disconnect"],
    )


async def test_an_idle_connection_is_closed_and_one_that_waits_for_an_answer_is_not() -> None:
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Send) -> None:
        await go.wait()
        await _saying(pieces=[b"x"])(scope, receive, send)

    async with connected(app) as (reader, writer, state), asyncio.timeout(300):
        writer.write(GET)
        while not state.tasks:
            await asyncio.sleep(0)
        [connection] = state.connections
        assert isinstance(connection, HttpProtocol)
        for _ in range(9):
            connection.check()
        go.set()
        assert await reader.readuntil(b"0\r\n\r\n")
        connection.check()
        connection.check()
        assert not connection.transport.is_closing()
        connection.check()
        assert await reader.read() == b""
