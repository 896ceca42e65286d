"""Exchange: a request and its answer, with an ASGI interface and a faster direct one.

An ASGI application reads the request with `receive`, and answers with `send`. An application may
also take the exchange from its scope, under the key `EXCHANGE`, and write the answer with the
exchange's own methods. These bypass all middleware, so a streamed token costs only one call.

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
"""Key of the ASGI scope extension that holds the `Exchange`."""
OVER_CONNECTION_LIMIT = "gateway.no_room"
"""Key of the ASGI scope extension that marks a request above the connection limit.

Such a request is served only if it is a health check, a request for metrics, or an admin's.
"""

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
STATUS_LINES = {
    status: b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b""))
    for status in range(200, 600)
}

MAX_UNREAD_BYTES = 64 * 1024
"""Bytes of a body that may wait for the application. Above that, reading is paused."""

# Characters that would end a header, or that receivers interpret in different ways (RFC 9110, 5.5).
_UNSAFE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Headers that say where an answer ends. This module sets them; an application may only give a
# length, and may ask to close the connection.
_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})

_CLOSE = b"connection: close\r\n\r\n"

App = Callable[..., Awaitable[None]]


class Carrier(Protocol):
    """Interface of a connection that an exchange uses."""

    transport: asyncio.Transport
    write_paused: bool
    """True while the buffer of unsent data is full."""

    @property
    def ending(self) -> bool:
        """True while the server shuts down: each connection closes after its next answer."""

    async def drain(self) -> None:
        """Wait until the write buffer has space again, or the client has disconnected."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def on_answered(self) -> None:
        """Handle the end of the answer."""

    def on_failed(self, error: BaseException | None) -> None:
        """Handle an application that has ended before its answer was complete.

        `error` is the exception that the application has raised; None if it has returned.
        """


class Exchange:
    """A request and its answer.

    `receive` and `send` are the callables of ASGI. After `send` has started the answer, `write`,
    `write_chunk` and `end` may continue it.
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
        # Do not store the scope: it refers to the exchange, and the cycle would hold all objects of
        # the request in memory until the garbage collector runs.
        self._carrier = carrier
        self._write: Callable[[bytes], None] = carrier.transport.write
        self._body = bytearray()
        self._receiving = True
        self._end_delivered = False
        self._expects_continue = fields.get(b"expect", b"").lower() == b"100-continue"
        # Event on which `receive` waits, None at all other times. Most requests need no event,
        # because their body arrives together with the headers.
        self._changed: asyncio.Event | None = None
        self.head_only = self._has_no_body = method == "HEAD"
        self._head = b""
        self._body_bytes_left: int | None = None
        self.fields = fields
        """The request's headers by lower-case name, with the last value of a repeated header."""
        self.keep_alive = keep_alive
        self.status = 0
        """HTTP status of the answer, 0 until the answer begins.

        The status is set before anything is sent: headers are sent with the first body bytes.
        """
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers to add to the answer, also if the server answers instead of the application."""
        self.complete = False
        self.disconnected = False
        self.on_disconnect: Callable[[], None] | None = None

    @property
    def has_sent_bytes(self) -> bool:
        """True if any part of the answer was sent."""
        return self.status != 0 and not self._head

    async def run(self, app: App, scope: dict[str, Any]) -> None:
        """Run the application for this request until it ends or fails."""
        try:
            await app(scope, self.receive, self.send)
        except BaseException as error:  # catch all: otherwise the client would wait forever
            # Do not log a cancellation: the server cancels requests after the shutdown grace.
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
        # Resume reading, because a disconnect is noticed only while reading. No more bytes of the
        # body can arrive.
        self._carrier.resume_reading()
        self._notify_receiver()

    def disconnect(self) -> None:
        """Record that the client has disconnected, or that its connection is no longer read.

        Later writes are ignored.
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
        """Return the body if it is complete and has at most `max_bytes` bytes, otherwise None.

        If the result is None, the body can still be read with `receive`.
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

        For a message with a part of the body, wait first until the write buffer has space.
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
        """Send a complete answer instead of running the application.

        Args:
            status: the HTTP status.
            lines: the encoded headers, with `content-length` and without `connection`.
            body: the body.
        """
        carrier = self._carrier
        # Close the connection if the client does not read its answers: otherwise it could send
        # requests without end, and unsent answers would fill the memory.
        self.keep_alive = self.keep_alive and not (carrier.ending or carrier.write_paused)
        last = b"\r\n" if self.keep_alive else _CLOSE
        self.status, self.complete = status, True
        self._write(b"".join((STATUS_LINES[status], lines, last, body)))
        self._write = _drop
        self._notify_receiver()
        carrier.on_answered()

    def write(self, body: bytes) -> None:
        """Send a part of the body, after the headers if these are unsent.

        Raise RuntimeError if the answer has not started, has ended, or exceeds its length.
        """
        if not self.disconnected:
            self._write_with_head(self._frame(body))

    def write_chunk(self, data: bytes) -> bool:
        """Send a non-empty part of a body without content-length, after the headers were sent.

        Return False if `drain` should be awaited before the next part. Streamed tokens are sent
        with this method, without the cost of middleware and of a message dict for each token.
        """
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self._carrier.write_paused

    async def drain(self, by: float | None = None) -> None:
        """Wait until the write buffer has space again, or the client has disconnected.

        Raise TimeoutError if this takes until `by`, a time in seconds of the event loop's clock.
        """
        if self._carrier.write_paused and not self.disconnected:
            # Create the timer only here: most calls return without waiting.
            async with asyncio.timeout_at(by):
                await self._carrier.drain()

    def end(self, body: bytes) -> None:
        """Send the last part of the body, and end the answer.

        Raise RuntimeError if the answer has not started, has ended, or does not have its length.
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
        self._write = _drop  # a late write must not get into the next answer
        self._notify_receiver()
        self._carrier.on_answered()

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Build the status line and headers, which are sent with the first bytes of the body."""
        if self.status:
            raise RuntimeError("the answer has started")
        if status not in STATUS_LINES:
            raise RuntimeError(f"{status} is no status of an answer")
        if not self.disconnected:
            self._head = self._build_head(status, [*headers, *self.headers])
            self.headers.clear()  # free them: a stream would hold them in memory until its end
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
        # The header `upgrade` must be named in `connection` (RFC 9110, 7.8).
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

    Answers are not chunked. The connection closes at the end of the answer.
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
    """Ignore data that is written after the answer is complete or the client has disconnected."""


@lru_cache(maxsize=256)
def _normalize_name(name: bytes) -> bytes:
    """Return a header's name in lower case. Raise RuntimeError for an invalid name."""
    if not _NAME.fullmatch(name):
        raise RuntimeError(f"{name!r} is no name of a header")
    return name.lower()
