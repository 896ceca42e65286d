"""A stand-in for a client's socket, and bytes that HTTP parsers interpret differently."""

from __future__ import annotations

import asyncio
from typing import Any

from gateway.http.protocol import HttpProtocol

GET = b"GET http://x/a HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"

# Bytes that HTTP parsers interpret differently.
ODD = [
    *(b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b"\0", b"\x0b", b"\x85", b"\xff", b"\x7f"),
    *(b"0", b"1", b"9" * 20, b"a", b"-", b"+", b"_", b"0x", b",", b";", b":", b'"', b"%", b"/"),
    *(b"Content-Length: 3\r\n", b"content-length:0\r\n", b"Content-Length : 1\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n", b"chunked", b", chunked"),
    *(b"Connection: keep-alive\r\n", b"Upgrade: websocket\r\nConnection: upgrade\r\n"),
    *(b"Host: y\r\n", b"\r\n folded", b"0\r\n\r\n", b"HTTP/1.0", b"HTTP/1.1", GET[:28]),
]


class Wire(asyncio.Transport):
    """A transport whose client reads all data at once."""

    def __init__(self, protocol: HttpProtocol) -> None:
        super().__init__()
        self.written = b""
        self.closed = self.paused = self.ended = False
        self._protocol = protocol
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        assert not self.ended, "behind the end"
        if not self.closed:
            self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def get_write_buffer_size(self) -> int:
        return 0
