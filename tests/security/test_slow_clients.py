"""Deliberately slow clients: the gateway closes their connections, and others are not delayed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from gateway.http.protocol import HttpProtocol
from tests.support.event_clock import EventClock
from tests.support.fake_triton import FakeTriton, serving
from tests.support.gateway_process import GatewayProcess, body
from tests.support.in_process import metric_of, running, save_tokenizer
from tests.support.local_stack import Stack
from tests.support.raw_http import HOST, answers, connect, next_answer, post, receive_all

pytestmark = pytest.mark.slow

HEAD_S, BODY_S = 3, 3
CLIENTS_IDLE_S = 5  # seconds until httpx closes an idle connection
HANGS_AFTER_S = 300
MANY = 200
START = b"GET /health/live HTTP/1.1\r\n"


@pytest.fixture(scope="module")
def gateway(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("slow")
    limits = {"header_timeout": HEAD_S, "body_timeout": BODY_S}
    with GatewayProcess(folder, stack, **limits) as gateway:
        yield gateway


async def _received(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes until the server closes or resets the connection."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(65536):
            data += piece
    return data


async def _slow_headers(port: int) -> tuple[float, bytes]:
    """Return the seconds until the server closes the connection, and its answer."""
    started = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.create_task(_received(reader))
    writer.write(START + HOST)
    with contextlib.suppress(ConnectionError):
        while not answer.done() and not reader.at_eof():
            writer.write(b"a: b\r\n")
            await asyncio.wait([answer], timeout=0.5)
    said = await answer
    writer.close()
    return time.monotonic() - started, said


async def test_headers_that_never_end_keep_nobody_waiting(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    async with (
        serving(FakeTriton(tokens=[65], fault=None, step=0)) as endpoint,
        running(tmp_path, endpoint, header_timeout=600) as (client, _, server),
    ):
        port = client.base_url.port
        slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MANY)]
        for _, writer in slow:
            writer.write(START + HOST)
        async with asyncio.timeout(HANGS_AFTER_S):
            while len(server.server_state.connections) < MANY:
                await asyncio.sleep(0.01)
        for _ in range(3):
            answer = await client.post("/v1/completions", json={"model": "m", "prompt": "x"})
            assert answer.status_code == 200
        assert not any(reader.at_eof() for reader, _ in slow)
        for _, writer in slow:
            writer.close()


async def test_headers_that_never_end_are_cut(gateway: GatewayProcess) -> None:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANGS_AFTER_S) as client:
        # This client's connection has sent headers, so the header timeout does not apply.
        assert (await client.get("/health/live")).status_code == 200
        slow = [asyncio.create_task(_slow_headers(gateway.port)) for _ in range(MANY)]
        assert (await client.post("/v1/completions", json=body())).status_code == 200
    for seconds, said in await asyncio.wait_for(asyncio.gather(*slow), HANGS_AFTER_S):
        [answer] = answers(said)
        assert answer.status == 408
        assert json.loads(answer.body)["error"]["code"] == "request_timeout"
        assert seconds >= HEAD_S


def test_a_connection_that_says_nothing_is_closed_without_a_word(gateway: GatewayProcess) -> None:
    with connect(gateway.url) as silent, connect(gateway.url) as second:
        second.sendall(START + HOST + b"\r\n")
        assert next_answer(second).status == 200
        second.sendall(b"\r\n")  # an incomplete request
        assert receive_all(silent) == b""
        [answer] = answers(receive_all(second))
        assert answer.status == 408


def test_a_body_that_trickles_is_cut(gateway: GatewayProcess) -> None:
    request = post("/detokenize", json.dumps({"tokens": [1] * 50}).encode())
    with connect(gateway.url) as connection:
        connection.settimeout(0.3)
        said = b""
        for byte in [request[:-50], *(bytes([b]) for b in request[-50:])]:
            connection.sendall(byte)
            with contextlib.suppress(TimeoutError):
                said = connection.recv(65536)
                break
    [answer] = answers(said)
    assert answer.status == 408


def test_a_body_that_trickles_after_its_answer_is_cut(gateway: GatewayProcess) -> None:
    with connect(gateway.url) as connection:
        connection.sendall(post("/v1/adapters", b"x" * 50)[:-50])
        assert next_answer(connection).status == 403
        connection.sendall(b"x")
        assert receive_all(connection) == b""  # closed without a second answer


async def test_a_large_body_may_take_its_time(tmp_path: Path) -> None:
    """Check that a large body may arrive slowly.

    Client and gateway share a process, so neither runs while the other does not.
    """
    save_tokenizer(tmp_path)
    content = json.dumps({"tokens": [1] * 150_000}).encode()
    request = post("/detokenize", content, b"connection: close")
    pieces = [request[n : n + 90_000] for n in range(0, len(request), 90_000)]
    assert len(pieces) * 1.0 > BODY_S + 1
    async with (
        serving(FakeTriton(tokens=[], fault=None, step=0)) as endpoint,
        running(tmp_path, endpoint, body_timeout=BODY_S) as (client, _, _),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(1.0)
        [answer] = answers(await reader.read())
        writer.close()
    assert answer.status == 200


def test_an_idle_connection_is_kept(gateway: GatewayProcess) -> None:
    """Check that a connection with one request behind it may stay idle for longer than httpx
    allows.
    """
    with connect(gateway.url) as connection:
        for pause_s in (CLIENTS_IDLE_S + 1, 0):
            connection.sendall(START + HOST + b"\r\n")
            assert next_answer(connection).status == 200
            time.sleep(pause_s)


# Slow readers. The scripted engine has more tokens than all buffers of the system hold.

TOKENS = 60_000
TOKEN_BYTES = 200  # less than one SSE event has
READERS = 20


async def _reading(port: int) -> socket.socket:
    """Start a stream, and return its socket once the first bytes have been read."""
    loop = asyncio.get_running_loop()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await loop.sock_connect(connection, ("127.0.0.1", port))
    wanted = {"model": "m", "prompt": "x", "stream": True, "max_tokens": TOKENS}
    await loop.sock_sendall(connection, post("/v1/completions", json.dumps(wanted).encode()))
    assert b" 200 " in await loop.sock_recv(connection, 20)
    return connection


def _is_full(connection: object) -> bool:
    """Return True if data waits in the transport's write buffer."""
    assert isinstance(connection, HttpProtocol)
    return connection.transport.get_write_buffer_size() > 0


@pytest.mark.slow
async def test_readers_of_a_byte_a_second_harm_nobody(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    servicer = FakeTriton(tokens=[65] * TOKENS, fault=None, step=0)
    loop = asyncio.get_running_loop()
    async with (
        serving(servicer) as endpoint,
        running(tmp_path, endpoint, max_seq_len=2 * TOKENS, write_timeout=3600) as (
            client,
            service,
            server,
        ),
    ):
        readers = [await _reading(client.base_url.port or 0) for _ in range(READERS)]
        for connection in server.server_state.connections:
            # The default send buffer takes megabytes of each stream, which would cost this test a
            # minute.
            accepted = connection.transport.get_extra_info("socket")
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
        try:
            async with asyncio.timeout(10 * HANGS_AFTER_S):
                while not all(_is_full(each) for each in server.server_state.connections):
                    await asyncio.sleep(0.05)
            # Wait until all buffers on the way are full.
            given = -1
            while given != servicer.given:
                given = servicer.given
                await asyncio.sleep(1)
            gc.collect()
            before = psutil.Process().memory_info().rss
            for _ in range(5):
                for reader in readers:
                    assert await loop.sock_recv(reader, 1)
                assert (await client.get("/v1/models")).status_code == 200
                await asyncio.sleep(1)
            grown = psutil.Process().memory_info().rss - before
            # The unread answers have READERS * TOKENS * TOKEN_BYTES, some 240 MB.
            assert grown < READERS * TOKENS * TOKEN_BYTES / 10
            for connection in server.server_state.connections:
                assert isinstance(connection, HttpProtocol)
                assert connection.transport.get_write_buffer_size() < 128 * 1024
            assert metric_of(service, "gateway_generations_in_flight") == READERS
        finally:
            for reader in readers:
                reader.close()
        async with asyncio.timeout(HANGS_AFTER_S):
            while metric_of(service, "gateway_generations_in_flight"):
                await asyncio.sleep(0.05)


async def test_a_stream_that_is_not_read_is_ended(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    servicer = FakeTriton(tokens=[65] * TOKENS, fault=None, step=0)
    async with (
        serving(servicer) as endpoint,
        running(tmp_path, endpoint, max_seq_len=2 * TOKENS, write_timeout=2) as (
            client,
            service,
            _,
        ),
    ):
        reader = await _reading(client.base_url.port or 0)
        async with asyncio.timeout(HANGS_AFTER_S):
            while not metric_of(service, "gateway_stops_total", reason="disconnect"):
                await asyncio.sleep(0.1)
        assert metric_of(service, "gateway_generations_in_flight") == 0
        reader.close()
        async with asyncio.timeout(HANGS_AFTER_S):
            while not servicer.stopped:
                await asyncio.sleep(0.01)
    assert servicer.stopped == [request.id for request in servicer.requests]


async def test_the_deadline_waits_for_no_reader(tmp_path: Path) -> None:
    """Check that a request's deadline frees all its resources despite a slow reader.

    The client has not read the buffered tokens, and reads one byte now and then.
    """
    clock, loop = EventClock(), asyncio.get_running_loop()
    save_tokenizer(tmp_path)
    servicer = FakeTriton(tokens=[65] * TOKENS, fault=None, step=0)
    limits = {"max_seq_len": 2 * TOKENS, "request_timeout": 600, "write_timeout": 36_000}
    async with (
        serving(servicer) as endpoint,
        running(tmp_path, endpoint, **limits) as (client, service, server),
    ):
        reader = await _reading(client.base_url.port or 0)
        [connection] = server.server_state.connections
        assert isinstance(connection, HttpProtocol)
        accepted = connection.transport.get_extra_info("socket")
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 * 1024)
        async with asyncio.timeout(HANGS_AFTER_S):
            while not connection.write_paused:
                await asyncio.sleep(0.01)
        clock.leap(1000)
        async with asyncio.timeout(HANGS_AFTER_S):
            while not servicer.stopped or service.admission.in_flight:
                assert await loop.sock_recv(reader, 1)
                await asyncio.sleep(0.1)
        assert connection.write_paused
        assert metric_of(service, "gateway_generations_in_flight") == 0
        assert metric_of(service, "gateway_stops_total", reason="timeout") == 1
        assert not any(replica.in_flight for replica in service.replicas)
        said = b""
        while b"[DONE]" not in said[-100:]:
            said += await loop.sock_recv(reader, 65536)
        assert b'"code":"timeout"' in said[-1000:]
        reader.close()


async def test_an_answer_that_nobody_takes_keeps_no_connection(tmp_path: Path) -> None:
    """Check that a complete answer that is not read is dropped and its connection closed."""
    save_tokenizer(tmp_path)
    wanted = {"prompt": "x" * 1_000_000, "return_token_strs": True}
    loop = asyncio.get_running_loop()
    async with (
        serving(FakeTriton(tokens=[], fault=None, step=0)) as endpoint,
        running(tmp_path, endpoint, write_timeout=2, max_seq_len=2_000_000) as (client, _, server),
    ):
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.setblocking(False)
            await loop.sock_connect(reader, ("127.0.0.1", client.base_url.port or 0))
            request = post("/tokenize", json.dumps(wanted).encode(), b"connection: close")
            await loop.sock_sendall(reader, request)
            assert b" 200 " in await loop.sock_recv(reader, 20)
            [connection] = server.server_state.connections
            assert isinstance(connection, HttpProtocol)
            assert connection.transport.get_write_buffer_size() > 0
            async with asyncio.timeout(HANGS_AFTER_S):
                while server.server_state.connections:
                    await asyncio.sleep(0.1)
