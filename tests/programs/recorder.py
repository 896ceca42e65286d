"""A TCP relay between a program and the gateway that records HTTP/1.1 exchanges."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from ops.local_stack.ports import LOCALHOST

_CHUNK = 64 * 1024
_NO_BODY = frozenset((101, 204, 304))


@dataclass(frozen=True)
class Message:
    """An HTTP request or response."""

    start: str
    """The request line or status line."""
    headers: dict[str, str]
    """Values by lower-case header name."""
    body: bytes

    @property
    def method(self) -> str:
        return self.start.split(" ")[0]

    @property
    def path(self) -> str:
        return self.start.split(" ")[1]

    @property
    def status(self) -> int:
        return int(self.start.split(" ")[1])


@dataclass(frozen=True)
class Exchange:
    """A request and its response, or None if the connection ended before it."""

    request: Message
    response: Message | None

    @property
    def is_post(self) -> bool:
        return self.request.method == "POST"


@dataclass
class _Connection:
    sent: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)

    def exchanges(self) -> list[Exchange]:
        requests = _messages(bytes(self.sent), [])
        responses = _messages(bytes(self.received), [request.method for request in requests])
        missing = len(requests) - len(responses)
        return [
            Exchange(request, response)
            for request, response in zip(requests, [*responses, *[None] * missing], strict=True)
        ]


class Recorder:
    """A relay to a port that records all bytes."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server((LOCALHOST, 0))
        self._connections: list[_Connection] = []
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self.url = f"http://{LOCALHOST}:{self._listener.getsockname()[1]}"

    @contextlib.contextmanager
    def running(self) -> Iterator[Recorder]:
        """Accept connections while the context is open, and close the remaining ones at the end."""
        accepting = threading.Thread(target=self._accept)
        accepting.start()
        try:
            yield self
        finally:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            accepting.join()
            for each in self._sockets:
                _close(each)
            for thread in self._threads:
                thread.join()
            for each in self._sockets:
                each.close()

    def exchanges(self) -> list[Exchange]:
        """Return the exchanges of all connections, one connection after the other."""
        return [exchange for each in self._connections for exchange in each.exchanges()]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((LOCALHOST, self._target))
            except OSError:
                client.close()
                continue
            connection = _Connection()
            self._connections.append(connection)
            self._sockets += [client, server]
            for source, sink, kept in (
                (client, server, connection.sent),
                (server, client, connection.received),
            ):
                thread = threading.Thread(target=_copy, args=(source, sink, kept), daemon=True)
                thread.start()
                self._threads.append(thread)


def _copy(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_CHUNK):
            kept += data
            sink.sendall(data)
    for each in (source, sink):
        _close(each)


def _close(connection: socket.socket) -> None:
    """Close a connection, which the other end may have closed already."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _messages(data: bytes, methods: list[str]) -> list[Message]:
    """Parse complete messages. `methods` are those of the requests to which responses belong."""
    messages: list[Message] = []
    while data:
        head, found, rest = data.partition(b"\r\n\r\n")
        if not found:
            break
        start, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        is_response = start.startswith("HTTP/")
        if is_response and start.split(" ")[1] == "100":
            data = rest
            continue
        empty = is_response and (
            int(start.split(" ")[1]) in _NO_BODY or methods[len(messages)] == "HEAD"
        )
        body, data = (b"", rest) if empty else _body(headers, rest)
        messages.append(Message(start, headers, body))
    return messages


def _body(headers: dict[str, str], data: bytes) -> tuple[bytes, bytes]:
    """Return the message's body and the data after it."""
    if headers.get("transfer-encoding", "").lower() != "chunked":
        length = int(headers.get("content-length", 0))
        return data[:length], data[length:]
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size.partition(b";")[0] or b"0", 16)
        body += data[:length]
        data = data[length + 2 :]
        if not length:
            break
    return body, data
