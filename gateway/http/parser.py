"""Request parser that ignores offers to upgrade the protocol, even if the request has a body.

A server may ignore such an offer (RFC 9110, 7.8). java.net.http, which many Java clients use,
offers h2c with each request that it sends without TLS. httptools assumes that all data after such
headers belongs to the other protocol, even if the headers announce a body. A second parser
therefore reads the body. It first gets a minimal head with the same content-length or
transfer-encoding.
"""

from __future__ import annotations

from typing import Protocol

from httptools import HttpParserUpgrade, HttpRequestParser


class ParserEvents(Protocol):
    """Receiver of httptools' callbacks, with attributes that `RequestParser` reads and sets."""

    parser: HttpRequestParser
    """The parser that must get the next data. `RequestParser` may replace it."""

    framing: tuple[bytes, bytes] | None
    """For a request with an upgrade offer: the header that says where the body ends.

    None if there is no body, or no such offer.
    """

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser(HttpRequestParser):
    """Request parser that replaces `events.parser` to read a body after an upgrade offer."""

    __slots__ = ("_events",)

    def __init__(self, events: ParserEvents, head: _HeadFilter | None = None) -> None:
        super().__init__(head or events)
        self._events = events
        # Accept data after a request with `connection: close`, as uvicorn does, instead of raising
        # an error. Such data gets no answer.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # asyncio has bytes
        """Parse received data.

        Raises the errors of httptools. After an upgrade offer, HttpParserUpgrade is raised only if
        the request has no body.
        """
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
    """Callbacks that drop the events of the minimal head, and pass on all later events."""

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
