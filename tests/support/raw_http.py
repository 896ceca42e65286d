"""HTTP/1.1 over raw sockets, for requests that no client library would send."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

HOST = b"host: x\r\n"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


@contextmanager
def connect(url: str, *, timeout_s: float = 60, receive_buffer: int = 0) -> Iterator[socket.socket]:
    """Connect to the server of `url`. `receive_buffer` is in bytes; 0 is the system's default."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.socket() as connection:
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(timeout_s)
        connection.connect((parts.hostname, parts.port or 80))
        yield connection


def receive_all(connection: socket.socket) -> bytes:
    """Return all bytes until the server closes or resets the connection."""
    data = b""
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


def next_answer(connection: socket.socket) -> Answer:
    """Return the next answer, which must have a Content-Length."""
    data = b""
    while True:
        piece = connection.recv(65536)
        assert piece, "closed"
        data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if length and len(body) >= int(length):
            [answer] = answers(data)
            return answer


def answers(data: bytes) -> list[Answer]:
    """Return the complete answers in `data`, after checking that there are no other bytes."""
    found = []
    while data:
        head, end, data = data.partition(b"\r\n\r\n")
        assert end, head
        first, *lines = head.decode("latin-1").split("\r\n")
        assert first.startswith("HTTP/1.1 "), first
        pairs = (line.partition(": ") for line in lines)
        headers = {name.lower(): value for name, _, value in pairs}
        if headers.get("transfer-encoding") == "chunked":
            body, data = _decode_chunked(data)
        else:
            length = int(headers["content-length"])
            assert len(data) >= length
            body, data = data[:length], data[length:]
        found.append(Answer(int(first.split()[1]), headers, body))
    return found


def _decode_chunked(data: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        assert data[length : length + 2] == b"\r\n"
        body, data = body + data[:length], data[length + 2 :]
        if not length:
            return body, data


def post(path: str, body: bytes, *headers: bytes) -> bytes:
    """Return a POST request with a Content-Length. `headers` are lines without line ends."""
    lines = b"".join(header + b"\r\n" for header in headers)
    length = b"content-length: %d\r\n\r\n" % len(body)
    return b"POST " + path.encode() + b" HTTP/1.1\r\n" + HOST + lines + length + body
