"""Request parser that ignores offers to upgrade the protocol, also if the request has a body.

A server may ignore such an offer (RFC 9110, 7.8). java.net.http, which many Java clients use,
offers h2c with each request that it sends without TLS. httptools takes all data after such headers
for the other protocol, even if the headers announce a body. So a second parser reads the body. It
is first given a minimal head with the same content-length or transfer-encoding.
"""

from __future__ import annotations

from typing import Protocol

from httptools import HttpParserUpgrade, HttpRequestParser


class ParserEvents(Protocol):
    """Callbacks of httptools, and the state that `RequestParser` reads and sets."""

    parser: HttpRequestParser
    """The parser for the next data."""

    framing: tuple[bytes, bytes] | None
    """The header that says where the body of a request with an upgrade offer ends, if any."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser(HttpRequestParser):
    """A parser that sets `events.parser` to another one for a body after an upgrade offer."""

    __slots__ = ("_events",)

    def __init__(self, events: ParserEvents, head: _HeadFilter | None = None) -> None:
        super().__init__(head or events)
        self._events = events
        # Accept data after a request with `connection: close`, which gets no answer (as uvicorn).
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # asyncio has bytes
        """Parse data; raise httptools' errors, but HttpParserUpgrade only without a body."""
        try:
            super().feed_data(data)
        except HttpParserUpgrade as offer:
            if self._events.framing is None:
                raise
            head = b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n" % self._events.framing
            self._events.framing = None
            parser = self._events.parser = RequestParser(self._events, _HeadFilter(self._events))
            parser.feed_data(head)
            parser.feed_data(data[offer.args[0] :])


class _HeadFilter:
    """Callbacks that suppress the events of the minimal head and pass on all later ones."""

    def __init__(self, events: ParserEvents) -> None:
        self._events = events
        self._over = False
        self.on_body = events.on_body
        self.on_message_complete = events.on_message_complete

    def on_message_begin(self) -> None:
        if self._over:
            self._events.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._over:
            self._events.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._over:
            self._events.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._over:
            self._events.on_headers_complete()
        self._over = True
