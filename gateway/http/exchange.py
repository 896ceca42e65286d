"""Exchange: an HTTP request and its response, with an ASGI interface and a faster direct interface.

An ASGI application reads the request with `receive`, and answers with `send`. An application may
also get the `Exchange` object from the `extensions` of the ASGI scope, under the key `EXCHANGE`,
and write the response with its methods. These methods bypass all middleware, so sending a streamed
token takes only one call.

See decision 036 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Protocol

log = logging.getLogger(__name__)

EXCHANGE = "gateway.exchange"
"""Key in the ASGI scope's `extensions` for the request's `Exchange`."""
OVER_CONNECTION_LIMIT = "gateway.no_room"
"""Key in the ASGI scope's `extensions` that marks a request above the connection limit.

Such a request is served only if it is a health check, a request for metrics, or a request of an
admin.
"""

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
STATUS_LINES = {
    status: b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b""))
    for status in range(200, 600)
}

MAX_UNREAD_BYTES = 64 * 1024
"""Size in bytes of the request body's buffer above which reading from the client is paused.

The buffer holds body bytes that have arrived but that the application has not read.
"""

# Control characters that are refused in header values. Some would end the header, and receivers
# interpret others in different ways (RFC 9110, 5.5).
_UNSAFE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Headers that determine where a response ends. This module sets them itself. An application may
# pass only two of them: the content-length, and `connection: close`.
_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})

_CLOSE = b"connection: close\r\n\r\n"

App = Callable[..., Awaitable[None]]


class Carrier(Protocol):
    """Interface that the class `Exchange` requires of a connection."""

    transport: asyncio.Transport
    write_paused: bool
    """True while the buffer of unsent data is full."""

    @property
    def ending(self) -> bool:
        """True while the server shuts down. Each connection then closes after its next response."""

    async def drain(self) -> None:
        """Wait until the write buffer has space again or the client has disconnected."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def on_answered(self) -> None:
        """End the request. Called when the complete response was passed to the transport."""

    def on_failed(self, error: BaseException | None) -> None:
        """Send an error or close the connection, because the application sent no complete response.

        `error` is the exception that the application raised, or None if the application returned.
        """


class Exchange:
    """An HTTP request and its response.

    `receive` and `send` are the callables that ASGI passes to an application. After `send` has
    started the response, the application may call `write`, `write_chunk` and `end` instead of
    `send`.
    """

    __slots__ = (
        "_body",
        "_body_bytes_left",
        "_carrier",
        "_changed",
        "_end_delivered",
        "_expects_continue",
        "_has_no_body",
        "_head",
        "_receiving",
        "_write",
        "complete",
        "disconnected",
        "fields",
        "head_only",
        "headers",
        "keep_alive",
        "on_disconnect",
        "status",
    )

    def __init__(
        self, carrier: Carrier, method: str, fields: Mapping[bytes, bytes], *, keep_alive: bool
    ) -> None:
        # Do not store the scope here. The scope refers to the exchange, so the reference cycle
        # would hold the request's objects in memory until the garbage collector runs.
        self._carrier = carrier
        self._write: Callable[[bytes], None] = carrier.transport.write
        self._body = bytearray()
        self._receiving = True
        self._end_delivered = False
        self._expects_continue = fields.get(b"expect", b"").lower() == b"100-continue"
        # Event that `receive` waits for; None while `receive` does not wait. Created on demand,
        # because most requests need no event: their body arrives together with the headers.
        self._changed: asyncio.Event | None = None
        self.head_only = self._has_no_body = method == "HEAD"
        self._head = b""
        self._body_bytes_left: int | None = None
        self.fields = fields
        """The request's headers by lower-case name, with the last value of a repeated header."""
        self.keep_alive = keep_alive
        self.status = 0
        """HTTP status of the response; 0 before the response has started.

        The status is set before any bytes are sent, because the headers are sent together with the
        first bytes of the body.
        """
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers that are added to the response.

        They are also added if the server sends an error instead of the application's response.
        """
        self.complete = False
        self.disconnected = False
        self.on_disconnect: Callable[[], None] | None = None

    @property
    def has_sent_bytes(self) -> bool:
        """True if at least the response's headers were sent."""
        return self.status != 0 and not self._head

    async def run(self, app: App, scope: dict[str, Any]) -> None:
        """Run the application for this request, and log its errors.

        Call `Carrier.on_failed` if the application ends without a complete response.
        """
        try:
            await app(scope, self.receive, self.send)
        except BaseException as error:  # catch every exception: else the client would wait forever
            # Do not log a cancellation: it is expected, because the server cancels requests that
            # still run after the shutdown grace period.
            if not isinstance(error, asyncio.CancelledError):
                log.error("the application failed", exc_info=error)
            if not self.complete and not self.disconnected:
                self._carrier.on_failed(error)
        else:
            if not self.complete and not self.disconnected:
                log.error("the application has ended without a complete answer")
                self._carrier.on_failed(None)

    def feed(self, body: bytes) -> None:
        """Add received bytes of the request's body."""
        self._body += body
        if len(self._body) > MAX_UNREAD_BYTES:
            self._carrier.pause_reading()
        self._notify_receiver()

    def feed_end(self) -> None:
        """Record that the request's body is complete."""
        self._receiving = False
        # Resume reading, because a disconnect is noticed only while reading. The buffer cannot
        # grow, because no more bytes of this body can arrive.
        self._carrier.resume_reading()
        self._notify_receiver()

    def disconnect(self) -> None:
        """Record that the client has disconnected, or that the server gives up the connection.

        Later writes are ignored. The first call runs `on_disconnect`.
        """
        if self.disconnected:
            return
        self.disconnected = True
        self._write = _drop
        self._notify_receiver()
        if self.on_disconnect is not None:
            self.on_disconnect()

    async def receive(self) -> dict[str, Any]:
        if self._expects_continue:
            self._expects_continue = False
            if not self.status and not self.disconnected:
                self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._carrier.resume_reading()
        while not (self.disconnected or self.complete):
            if self._body or not (self._receiving or self._end_delivered):
                body, self._body = bytes(self._body), bytearray()
                self._end_delivered = not self._receiving
                return {"type": "http.request", "body": body, "more_body": self._receiving}
            self._changed = self._changed or asyncio.Event()
            await self._changed.wait()
        return {"type": "http.disconnect"}

    def take_complete_body(self, max_bytes: int) -> bytes | None:
        """Return the request body if it is complete and not larger than `max_bytes`.

        Otherwise return None, and leave the body for `receive`. Also return None if the body was
        read before, or if the client has disconnected.
        """
        if (
            self._receiving
            or self._end_delivered
            or self.disconnected
            or len(self._body) > max_bytes
        ):
            return None
        body, self._body = bytes(self._body), bytearray()
        self._end_delivered = True
        return body

    async def send(self, message: Any) -> None:
        """Send an ASGI message. Raise RuntimeError if the message is invalid.

        Before sending body bytes, wait until the write buffer has space.
        """
        if message["type"] == "http.response.start":
            self._begin(message["status"], message.get("headers", ()))
            return
        if message["type"] != "http.response.body":
            raise RuntimeError(f"{message['type']} is no part of an answer here")
        await self.drain()
        body = message.get("body", b"")
        if message.get("more_body", False):
            self.write(body)
        else:
            self.end(body)

    def answer(self, status: int, lines: bytes, body: bytes) -> None:
        """Send a complete response instead of running the application.

        Args:
            status: the HTTP status.
            lines: the encoded header lines, with `content-length` and without `connection`. Each
                line ends with CRLF.
            body: the complete body.
        """
        carrier = self._carrier
        # Close the connection if the client does not read its responses. Otherwise the client could
        # send requests without end, and the unsent responses would fill the memory.
        self.keep_alive = self.keep_alive and not (carrier.ending or carrier.write_paused)
        last = b"\r\n" if self.keep_alive else _CLOSE
        self.status, self.complete = status, True
        self._write(b"".join((STATUS_LINES[status], lines, last, body)))
        self._write = _drop
        self._notify_receiver()
        carrier.on_answered()

    def write(self, body: bytes) -> None:
        """Send bytes of the response's body. Send the headers first if they were not sent yet.

        Raise RuntimeError if the response has not started, has ended, or exceeds its
        content-length.
        """
        if not self.disconnected:
            self._write_with_head(self._frame(body))

    def write_chunk(self, data: bytes) -> bool:
        """Send `data`, which must not be empty, as one chunk of a chunked response.

        The headers must have been sent before. Return False if the write buffer is full: the caller
        should then await `drain` before the next chunk. This method is for streamed tokens. It
        avoids middleware and an ASGI message dict for each token.
        """
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self._carrier.write_paused

    async def drain(self, by: float | None = None) -> None:
        """Wait until the write buffer has space again or the client has disconnected.

        `by` is a deadline in seconds of the event loop's clock; None for no deadline. Raise
        TimeoutError if the deadline passes.
        """
        if self._carrier.write_paused and not self.disconnected:
            # Create the timer only if the buffer is full: most calls return without waiting.
            async with asyncio.timeout_at(by):
                await self._carrier.drain()

    def end(self, body: bytes) -> None:
        """Send the last bytes of the body, and complete the response.

        Raise RuntimeError if the response has not started or has ended, or if the total length of
        the body differs from the content-length.
        """
        if self.disconnected:
            return
        last = self._frame(body)
        if self._body_bytes_left is None:
            last += self._LAST
        elif self._body_bytes_left:
            raise RuntimeError("the answer is shorter than its content-length")
        self._write_with_head(last)
        self.complete = True
        self._write = _drop  # a late write must not get into the next request's answer
        self._notify_receiver()
        self._carrier.on_answered()

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Build the status line and headers. They are sent later, with the first body bytes."""
        if self.status:
            raise RuntimeError("the answer has started")
        if status not in STATUS_LINES:
            raise RuntimeError(f"{status} is no status of an answer")
        if not self.disconnected:
            self._head = self._build_head(status, [*headers, *self.headers])
            self.headers.clear()  # free the memory: a stream may run for minutes
        self.status = status

    def _build_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        if _UNSAFE.search(b" ".join([value for _, value in headers])):
            raise RuntimeError("a header's value has a control character")
        self._expects_continue = False
        keep_alive_after = self.keep_alive and not self._carrier.ending
        lines = [STATUS_LINES[status]]
        length = None
        for given, value in headers:
            name = _normalize_name(given)
            if name in _FRAMING:
                if name == b"connection":
                    keep_alive_after = keep_alive_after and b"close" not in value.lower()
                elif name == b"content-length":
                    if length is not None or not value.isdigit():
                        raise RuntimeError("a length that is none, or a second one")
                    length = int(value)
                    lines += b"content-length: ", value, b"\r\n"
            else:
                lines += name, b": ", value, b"\r\n"
        if self._has_no_body or status in (204, 304):
            self._has_no_body, length = True, 0
        elif length is None:
            lines.append(self._CODING)
        # A 426 response has the header `upgrade`, which `connection` must name (RFC 9110, 7.8).
        last = b"connection: upgrade, close\r\n\r\n" if status == 426 else _CLOSE
        lines.append(b"\r\n" if keep_alive_after else last)
        self._body_bytes_left, self.keep_alive = length, keep_alive_after
        return b"".join(lines)

    def _frame(self, body: bytes) -> bytes:
        if not self.status or self.complete:
            raise RuntimeError("a piece of a body before its head, or behind its end")
        if self._has_no_body:
            return b""
        if self._body_bytes_left is None:
            return self._encode_chunk(body) if body else b""
        self._body_bytes_left -= len(body)
        if self._body_bytes_left < 0:
            raise RuntimeError("the answer is longer than its content-length")
        return body

    _CODING = b"transfer-encoding: chunked\r\n"
    _LAST = b"0\r\n\r\n"

    @staticmethod
    def _encode_chunk(body: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(body), body)

    def _write_with_head(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        self._write(data)

    def _notify_receiver(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


class Http10Exchange(Exchange):
    """Exchange with an HTTP/1.0 client.

    Responses are not chunked, because HTTP/1.0 has no chunked coding. The connection closes at the
    end of the response.
    """

    __slots__ = ()

    _CODING = b""
    _LAST = b""

    @staticmethod
    def _encode_chunk(body: bytes) -> bytes:
        return body

    def write_chunk(self, data: bytes) -> bool:
        self._write(data)
        return not self._carrier.write_paused


def _drop(_: bytes) -> None:
    """Discard data. `Exchange._write` is this function after the response or a disconnect."""


@lru_cache(maxsize=256)
def _normalize_name(name: bytes) -> bytes:
    """Return a header's name in lower case. Raise RuntimeError for an invalid name."""
    if not _NAME.fullmatch(name):
        raise RuntimeError(f"{name!r} is no name of a header")
    return name.lower()
