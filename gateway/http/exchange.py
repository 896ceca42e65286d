"""A request and its answer, for ASGI and for direct use.

An ASGI application reads and answers through `receive` and `send`. An application may also take the
exchange from its scope, under `EXCHANGE`, and write to it directly, past all middleware: a streamed
token is then one call.

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
"""Key of the ASGI scope extension of a request above the connection limit. Only health checks,
metrics and admins are served then."""

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
STATUS_LINES = {
    status: b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b""))
    for status in range(200, 600)
}

MAX_UNREAD_BYTES = 64 * 1024
"""Bytes of a body that may wait for the application; reading pauses above that."""

# Characters that would end a header, or that receivers interpret differently (RFC 9110, 5.5).
_UNSAFE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Only this module says where an answer ends, so an application cannot contradict it.
_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})

_CLOSE = b"connection: close\r\n\r\n"

App = Callable[..., Awaitable[None]]


class Carrier(Protocol):
    """The connection, as its exchange sees it."""

    transport: asyncio.Transport
    write_paused: bool
    """True while the buffer of unsent data is full."""

    @property
    def ending(self) -> bool:
        """True while the server shuts down: each connection closes after its next answer."""

    async def drain(self) -> None:
        """Wait until the buffer has space again, or the client has left."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def on_answered(self) -> None:
        """Handle that the answer is complete."""

    def on_failed(self, error: BaseException | None) -> None:
        """Handle that the application ended before the answer was complete.

        `error` is the exception, None if the application returned.
        """


class Exchange:
    """A request and its answer.

    `receive` and `send` are ASGI's. After `send` has started the answer, `write` and `end` may
    continue it.
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
        # Set only while `receive` waits: most bodies arrive together with the headers.
        self._changed: asyncio.Event | None = None
        self.head_only = self._has_no_body = method == "HEAD"
        self._head = b""
        self._body_bytes_left: int | None = None
        self.fields = fields
        """The request's headers by lower-case name, with the last value of a repeated header."""
        self.keep_alive = keep_alive
        self.status = 0
        """HTTP status of the answer, 0 until it begins. The headers are sent with the first body
        bytes."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers to add to the answer, also if the server itself answers."""
        self.complete = False
        self.disconnected = False
        self.on_disconnect: Callable[[], None] | None = None

    @property
    def has_sent_bytes(self) -> bool:
        """Return True if any part of the answer was sent."""
        return self.status != 0 and not self._head

    async def run(self, app: App, scope: dict[str, Any]) -> None:
        """Run the application for this request until it ends or fails."""
        try:
            await app(scope, self.receive, self.send)
        except BaseException as error:  # for any exception, else the client would wait forever
            # Cancelled by the server after the shutdown grace: not an error of the application.
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
        # The body needs no more memory, and a disconnect is only noticed while reading.
        self._carrier.resume_reading()
        self._notify_receiver()

    def disconnect(self) -> None:
        """Record that the client has left, or that its connection is no longer read."""
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
        """Return the body if it is complete and has at most `max_bytes` bytes; else None.

        After None, `receive` still returns the body.
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
        """Raise RuntimeError for an invalid ASGI message. Headers are sent without waiting."""
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
        """Send a complete answer, instead of the application's.

        `lines` are the encoded headers, with `content-length` and without `connection`.
        """
        carrier = self._carrier
        # To a client that sends requests and takes no answers, each would add to those unsent.
        self.keep_alive = self.keep_alive and not (carrier.ending or carrier.write_paused)
        last = b"\r\n" if self.keep_alive else _CLOSE
        self.status, self.complete = status, True
        self._write(b"".join((STATUS_LINES[status], lines, last, body)))
        self._write = _drop
        self._notify_receiver()
        carrier.on_answered()

    def write(self, body: bytes) -> None:
        """Send a piece of the body after the headers. Raise RuntimeError like `send`."""
        if not self.disconnected:
            self._write_with_head(self._frame(body))

    def write_chunk(self, data: bytes) -> bool:
        """Send a further, non-empty piece of a body without content-length.

        Return False if `drain` should be awaited before the next piece. Streamed tokens come this
        way, which needs no middleware and no message dict for each token.
        """
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self._carrier.write_paused

    async def drain(self, by: float | None = None) -> None:
        """Wait until the client has received enough, or has left.

        Raise TimeoutError if it still waits at `by`, a time of the event loop.
        """
        if self._carrier.write_paused and not self.disconnected:
            # The timer is only created here, as few drains wait.
            async with asyncio.timeout_at(by):
                await self._carrier.drain()

    def end(self, body: bytes) -> None:
        """Send the last piece of the body. Raise RuntimeError like `send`."""
        if self.disconnected:
            return
        last = self._frame(body)
        if self._body_bytes_left is None:
            last += self._LAST
        elif self._body_bytes_left:
            raise RuntimeError("the answer is shorter than its content-length")
        self._write_with_head(last)
        self.complete = True
        self._write = _drop  # a late piece must not get into the next answer
        self._notify_receiver()
        self._carrier.on_answered()

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Build the status line and headers, which are sent with the first body bytes."""
        if self.status:
            raise RuntimeError("the answer has started")
        if status not in STATUS_LINES:
            raise RuntimeError(f"{status} is no status of an answer")
        if not self.disconnected:
            self._head = self._build_head(status, [*headers, *self.headers])
            self.headers.clear()  # else a stream would hold them in memory until its end
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
    """An exchange with an HTTP/1.0 client, without chunked encoding.

    The connection closes at the end of the answer.
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
    """Ignore the data: the writer after the answer is complete or the client has left."""


@lru_cache(maxsize=256)
def _normalize_name(name: bytes) -> bytes:
    """Return a header's name in lower case. Raise RuntimeError for an invalid name."""
    if not _NAME.fullmatch(name):
        raise RuntimeError(f"{name!r} is no name of a header")
    return name.lower()
