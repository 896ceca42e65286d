"""Requests that never reach the application: endless headers, and bytes that are not HTTP."""

from __future__ import annotations

import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from gateway.http.protocol import MAX_HEAD_BYTES
from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S
from tests.support.raw_http import answers, connect, receive_all

HEAD = b"GET /health/live HTTP/1.1\r\nhost: x\r\n"
# Number of pieces, enough for several reads: the read with the start of a request does not count.
MUCH = 40
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


def _sent(stack: Stack, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send raw bytes. Return the status, headers and body of the first answer."""
    url = urlsplit(stack.gateway)
    assert url.hostname is not None
    with socket.create_connection((url.hostname, url.port or 80), timeout=60) as connection:
        for piece in pieces:
            connection.sendall(piece)
        head, _, body = _until_complete(connection).partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return int(first.split()[1]), headers, body


def _until_complete(connection: socket.socket) -> bytes:
    received = b""
    while data := connection.recv(65536):
        received += data
        head, end, body = received.partition(b"\r\n\r\n")
        if end:
            length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
            if len(body) >= int(length):
                break
    return received


@pytest.mark.parametrize(
    "pieces",
    [
        [HEAD + b"a: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n"],
        [HEAD + b"a: ", *[b"x" * 16384] * MUCH],
        [HEAD, *[b"a: b\r\n" * 4096] * MUCH],
        [b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n"],
        [b"\r\n" * 8192] * MUCH,
        [CHUNKED + b"1\r\n{\r\n0\r\n", *[b"a: b\r\n" * 4096] * MUCH],
        [CHUNKED + b"1;", *[b"x" * 16384] * MUCH],
        [CHUNKED, *[b"1;" + b"x" * 16384 + b"\r\n{\r\n"] * MUCH, b"0\r\n\r\n"],
    ],
    ids=["one", "endless", "many", "url", "lines", "trailers", "chunk", "chunks"],
)
def test_headers_that_are_too_large(stack: Stack, pieces: list[bytes]) -> None:
    status, headers, body = _sent(stack, *pieces)
    assert status == 431
    assert (headers["content-type"], headers["connection"]) == ("application/json", "close")
    assert headers["x-request-id"]
    assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert httpx.get(f"{stack.gateway}/health/live", timeout=PATIENCE_S).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["TLS", "CONNECT", "negative length", "two lengths", "HTTP/2"],
)
def test_what_is_not_http_is_answered_in_the_envelope(stack: Stack, data: bytes) -> None:
    status, headers, body = _sent(stack, data)
    assert (status, headers["content-type"]) == (400, "application/json")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_large_headers_and_small_chunks_are_served(stack: Stack) -> None:
    almost = b"a: " + b"x" * (MAX_HEAD_BYTES - 200) + b"\r\n\r\n"
    assert _sent(stack, HEAD + almost)[0] == 200
    body = json.dumps({"tokens": [1] * 20_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
    detokenize = CHUNKED.replace(b"/v1/completions", b"/detokenize")
    assert _sent(stack, detokenize + chunks + b"0\r\n\r\n")[0] == 200


def test_two_requests_on_one_connection(stack: Stack) -> None:
    with httpx.Client(base_url=stack.gateway, timeout=PATIENCE_S) as client:
        for _ in range(3):
            headers = {"a": "x" * (MAX_HEAD_BYTES // 2)}
            assert client.get("/health/live", headers=headers).status_code == 200


def test_a_websocket_is_not_opened(stack: Stack) -> None:
    upgrade = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\r\n"
    assert _sent(stack, HEAD + upgrade)[0] == 200


HANDSHAKE = b"host: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"


@pytest.mark.parametrize("path", [b"/v1/responses", b"/v1/chat/completions"])
def test_a_websocket_handshake_is_sent_to_http(stack: Stack, path: bytes) -> None:
    status, headers, body = _sent(stack, b"GET " + path + b" HTTP/1.1\r\n" + HANDSHAKE)
    assert status == 426
    assert (headers["connection"], headers["upgrade"]) == ("upgrade, close", "HTTP/1.1")
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "websocket_not_offered")
    assert f"POST {path.decode()}" in error["message"]


def test_what_comes_behind_a_handshake_is_not_read(stack: Stack) -> None:
    with connect(stack.gateway) as connection:
        connection.sendall(b"GET /v1/responses HTTP/1.1\r\n" + HANDSHAKE + b"\x81\x05hello" + HEAD)
        [answer] = answers(receive_all(connection))
    assert answer.status == 426


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /v1/responses HTTP/1.1\r\nhost: x\r\n\r\n", 405),
        (
            b"GET /v1/responses HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\nhost: x\r\n\r\n",
            405,
        ),
        (b"GET /v1/responses HTTP/1.0\r\n" + HANDSHAKE, 405),
        (b"PUT /v1/responses HTTP/1.1\r\n" + HANDSHAKE, 405),
        (b"GET /v1/realtime HTTP/1.1\r\n" + HANDSHAKE, 404),
        (b"GET /v1/models HTTP/1.1\r\n" + HANDSHAKE, 200),
    ],
)
def test_no_other_request_is(stack: Stack, head: bytes, status: int) -> None:
    found, headers, _ = _sent(stack, head)
    assert found == status
    assert "upgrade" not in headers
    if status == 405:
        assert headers["allow"] == "POST"
