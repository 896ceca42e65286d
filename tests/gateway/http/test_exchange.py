"""What an ASGI application says becomes HTTP, or an end that nobody takes for an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from gateway.api.failures import answer
from gateway.http.connections import Connections
from gateway.http.exchange import EXCHANGE, App
from gateway.http.protocol import ConnectionLimits, HttpProtocol

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
Send = Callable[[dict[str, Any]], Awaitable[None]]


@contextlib.asynccontextmanager
async def connected(
    app: App,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, ServerState]]:
    """A client of a server that has nothing but `app`."""
    state, loop = ServerState(), asyncio.get_running_loop()

    def protocol() -> HttpProtocol:
        return HttpProtocol(
            uvicorn.Config(app),
            state,
            {},
            app=app,
            limits=ConnectionLimits(idle=2),
            connections=Connections(8),
            answer=answer,
        )

    async with await loop.create_server(protocol, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer, state
        finally:
            writer.close()


async def _asked(app: App, request: bytes = GET) -> bytes:
    """All that comes until the server closes."""
    async with connected(app) as (reader, writer, _), asyncio.timeout(60):
        writer.write(request)
        return await reader.read()


def _saying(*headers: tuple[bytes, bytes], pieces: list[bytes], status: int = 200) -> App:
    async def app(_scope: Any, _receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for number, piece in enumerate(pieces, 1):
            more = number < len(pieces)
            await send({"type": "http.response.body", "body": piece, "more_body": more})

    return app


@pytest.mark.parametrize(
    ("said", "pieces"), [(b"3", [b"four"]), (b"9", [b"four"]), (b"3", [b"fo", b"ur"])]
)
async def test_a_body_of_another_length_than_was_said(said: bytes, pieces: list[bytes]) -> None:
    told = await _asked(_saying((b"content-length", said), pieces=pieces))
    assert b"four" not in told


async def test_a_header_that_would_be_two(caplog: pytest.LogCaptureFixture) -> None:
    told = await _asked(_saying((b"a", b"b\r\nset-cookie: c"), pieces=[b""]))
    assert told.startswith(b"HTTP/1.1 500 ")
    assert b"set-cookie" not in told
    assert "control character" in caplog.text


async def test_no_answer_is_an_error_in_the_envelope() -> None:
    async def app(*_: Any) -> None:
        return

    head, _, body = (await _asked(app)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert json.loads(body)["error"]["type"] == "server_error"


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

    async with connected(app) as (reader, writer, _), asyncio.timeout(60):
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

    async with connected(app) as (_, writer, _), asyncio.timeout(60):
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

    async with connected(app) as (reader, writer, state), asyncio.timeout(60):
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
