"""One request and its answer.

An ASGI application reads and answers by `receive` and `send`. One that finds the exchange in its
scope, under `EXCHANGE`, may go past them and past all that wraps them: a streamed token is then
one call, and what every answer says is said once.
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
"""The extension in an ASGI scope that holds its `Exchange`."""
NO_ROOM = "gateway.no_room"
"""The extension in an ASGI scope of a request that is one too many: only what is answered always,
whatever else goes on, is to be answered."""

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
STATUS_LINES = {
    status: b"HTTP/1.1 %d %b\r\n" % (status, _PHRASES.get(status, b""))
    for status in range(200, 600)
}

MOST_UNREAD = 64 * 1024
"""Bytes of a body that may wait for the application before no more are read."""

# What would end a header, or be read in two ways (RFC 9110, 5.5).
_UNSAFE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
# Where an answer ends is told here alone: an application's own words could contradict it.
_FRAMING = frozenset({b"connection", b"content-length", b"transfer-encoding"})

_CLOSE = b"connection: close\r\n\r\n"

App = Callable[..., Awaitable[None]]


class Carrier(Protocol):
    """The connection, as its exchange sees it."""

    transport: asyncio.Transport
    write_paused: bool
    """Whether the client has as much waiting for it as may."""

    @property
    def ending(self) -> bool:
        """Whether answers that begin now are the last ones of their connections."""

    async def drain(self) -> None:
        """Returns once it has not, or has left."""

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def answered(self) -> None:
        """The answer is complete."""

    def failed(self, error: BaseException | None) -> None:
        """The application has ended without a whole answer."""


class Exchange:
    """`receive` and `send` are ASGI's; what `send` has begun, `write` and `end` may go on with."""

    __slots__ = (
        "_body",
        "_carrier",
        "_expects_continue",
        "_has_no_body",
        "_head",
        "_left",
        "_news",
        "_receiving",
        "_told_end",
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
        # No reference to the scope, which has one to this: whatever the request holds would wait
        # for the garbage collector.
        self._carrier = carrier
        self._write: Callable[[bytes], None] = carrier.transport.write
        self._body = bytearray()
        self._receiving = True
        self._told_end = False
        self._expects_continue = fields.get(b"expect", b"").lower() == b"100-continue"
        # Only while somebody waits: most bodies come with their head.
        self._news: asyncio.Event | None = None
        self.head_only = self._has_no_body = method == "HEAD"
        self._head = b""
        self._left: int | None = None
        self.fields = fields
        """The request's headers by their names in lower case; of several, the last."""
        self.keep_alive = keep_alive
        self.status = 0
        """Of the answer, 0 until it begins; its head goes out with what comes first of its body."""
        self.headers: list[tuple[bytes, bytes]] = []
        """What the answer says beside the application's own, whoever gives it."""
        self.complete = False
        self.disconnected = False
        self.on_disconnect: Callable[[], None] | None = None

    @property
    def told(self) -> bool:
        """Whether the client has a part of the answer, or all of it."""
        return self.status != 0 and not self._head

    async def run(self, app: App, scope: dict[str, Any]) -> None:
        """Until the application has ended, however that is."""
        try:
            await app(scope, self.receive, self.send)
        except BaseException as error:  # whatever it is, the client must not wait for more
            # The server cancels what outlives its grace.
            if not isinstance(error, asyncio.CancelledError):
                log.error("the application failed", exc_info=error)
            if not self.complete and not self.disconnected:
                self._carrier.failed(error)
        else:
            if not self.complete and not self.disconnected:
                log.error("the application has ended without a whole answer")
                self._carrier.failed(None)

    def feed(self, body: bytes) -> None:
        """A piece of the request's body has come."""
        self._body += body
        if len(self._body) > MOST_UNREAD:
            self._carrier.pause_reading()
        self._tell()

    def feed_end(self) -> None:
        self._receiving = False
        # Nothing more is to be kept here, and who is not read from cannot be seen to leave.
        self._carrier.resume_reading()
        self._tell()

    def disconnect(self) -> None:
        """The client has left, or is read from no more."""
        if self.disconnected:
            return
        self.disconnected = True
        self._write = _drop
        self._tell()
        if self.on_disconnect is not None:
            self.on_disconnect()

    async def receive(self) -> dict[str, Any]:
        if self._expects_continue:
            self._expects_continue = False
            if not self.status and not self.disconnected:
                self._write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._carrier.resume_reading()
        while not (self.disconnected or self.complete):
            if self._body or not (self._receiving or self._told_end):
                body, self._body = bytes(self._body), bytearray()
                self._told_end = not self._receiving
                return {"type": "http.request", "body": body, "more_body": self._receiving}
            self._news = self._news or asyncio.Event()
            await self._news.wait()
        return {"type": "http.disconnect"}

    def whole_body(self, most: int) -> bytes | None:
        """The body, where all of it has come and it is no longer than `most` bytes. Else None, and
        nothing is taken of what `receive` gives."""
        if self._receiving or self._told_end or self.disconnected or len(self._body) > most:
            return None
        body, self._body = bytes(self._body), bytearray()
        self._told_end = True
        return body

    async def send(self, message: Any) -> None:
        """Raises RuntimeError for an answer that is none in HTTP. The head waits for nobody."""
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
        """Send a complete answer that is made already, in place of an application's.

        `lines` are its headers, with its length, but for those of the connection.
        """
        carrier = self._carrier
        # To a client that sends requests and takes no answers, each would add to those unsent.
        self.keep_alive = self.keep_alive and not (carrier.ending or carrier.write_paused)
        last = b"\r\n" if self.keep_alive else _CLOSE
        self.status, self.complete = status, True
        self._write(b"".join((STATUS_LINES[status], lines, last, body)))
        self._write = _drop
        self._tell()
        carrier.answered()

    def write(self, body: bytes) -> None:
        """A piece of the body, behind the head. Raises RuntimeError as `send`."""
        if not self.disconnected:
            self._pass_on(self._framed(body))

    def write_chunk(self, data: bytes) -> bool:
        """A further piece of a body without a length, which must not be empty.

        False when `drain` should be awaited before the next one. A streamed token passes no
        middleware then, and no message in a dict.
        """
        self._write(b"%x\r\n%b\r\n" % (len(data), data))
        return not self._carrier.write_paused

    async def drain(self, by: float | None = None) -> None:
        """Returns once the client has taken enough, or has left.

        Raises TimeoutError if it still waits for that at `by`, a time of the event loop.
        """
        if self._carrier.write_paused and not self.disconnected:
            # No timer for each drain: few ever wait.
            async with asyncio.timeout_at(by):
                await self._carrier.drain()

    def end(self, body: bytes) -> None:
        """The last piece. Raises RuntimeError as `send`."""
        if self.disconnected:
            return
        last = self._framed(body)
        if self._left is None:
            last += self._LAST
        elif self._left:
            raise RuntimeError("the answer is shorter than its content-length")
        self._pass_on(last)
        self.complete = True
        self._write = _drop  # the next answer must not have a late piece of this one
        self._tell()
        self._carrier.answered()

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Makes the head, which goes out with what comes first of the body."""
        if self.status:
            raise RuntimeError("the answer has begun")
        if status not in STATUS_LINES:
            raise RuntimeError(f"{status} is no status of an answer")
        if not self.disconnected:
            self._head = self._made(status, [*headers, *self.headers])
            self.headers.clear()  # a stream would keep them until its end
        self.status = status

    def _made(self, status: int, said: list[tuple[bytes, bytes]]) -> bytes:
        if _UNSAFE.search(b" ".join([value for _, value in said])):
            raise RuntimeError("a header's value has a control character")
        self._expects_continue = False
        stays = self.keep_alive and not self._carrier.ending
        lines = [STATUS_LINES[status]]
        length = None
        for given, value in said:
            name = _checked(given)
            if name in _FRAMING:
                if name == b"connection":
                    stays = stays and b"close" not in value.lower()
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
        # A header `upgrade` goes with its name here (RFC 9110, 7.8).
        last = b"connection: upgrade, close\r\n\r\n" if status == 426 else _CLOSE
        lines.append(b"\r\n" if stays else last)
        self._left, self.keep_alive = length, stays
        return b"".join(lines)

    def _framed(self, body: bytes) -> bytes:
        if not self.status or self.complete:
            raise RuntimeError("a piece of a body before its head, or behind its end")
        if self._has_no_body:
            return b""
        if self._left is None:
            return self._chunk(body) if body else b""
        self._left -= len(body)
        if self._left < 0:
            raise RuntimeError("the answer is longer than its content-length")
        return body

    _CODING = b"transfer-encoding: chunked\r\n"
    _LAST = b"0\r\n\r\n"

    @staticmethod
    def _chunk(body: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(body), body)

    def _pass_on(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        self._write(data)

    def _tell(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None


class OldExchange(Exchange):
    """With a client of HTTP/1.0, which knows no chunks: its connection ends with the answer."""

    __slots__ = ()

    _CODING = b""
    _LAST = b""

    @staticmethod
    def _chunk(body: bytes) -> bytes:
        return body

    def write_chunk(self, data: bytes) -> bool:
        self._write(data)
        return not self._carrier.write_paused


def _drop(_: bytes) -> None:
    """Where pieces go that nobody waits for."""


@lru_cache(maxsize=256)
def _checked(name: bytes) -> bytes:
    """A header's name in lower case. Raises RuntimeError."""
    if not _NAME.fullmatch(name):
        raise RuntimeError(f"{name!r} is no name of a header")
    return name.lower()
