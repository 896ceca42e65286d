"""Request parser that ignores offers to upgrade to another protocol, and still reads the body.

A server may ignore an `upgrade` header (RFC 9110, 7.8). For example, java.net.http, which many Java
clients use, offers h2c in each request without TLS. httptools assumes that all data after the
headers of such a request belongs to the other protocol, even if the request has a body. A second
parser therefore reads the body. This parser first gets an artificial head: a request line, and the
request's content-length or transfer-encoding.
"""

from __future__ import annotations

from typing import Protocol

from httptools import HttpParserUpgrade, HttpRequestParser


class ParserEvents(Protocol):
    """Receiver of httptools' callbacks, with two attributes for the class `RequestParser`."""

    parser: HttpRequestParser
    """Parser for the data that arrives next. `RequestParser` may replace this parser."""

    framing: tuple[bytes, bytes] | None
    """Content-length or transfer-encoding header of a request that offers an upgrade.

    None if the request has no body or offers no upgrade.
    """

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser(HttpRequestParser):
    """Request parser that can also read the body of a request that offers an upgrade.

    To read such a body, this parser creates a second parser, and stores it in `events.parser`.
    """

    __slots__ = ("_events",)

    def __init__(self, events: ParserEvents, head: _HeadFilter | None = None) -> None:
        super().__init__(head or events)
        self._events = events
        # Ignore data after a request with `connection: close`, as uvicorn does. By default,
        # httptools would raise an error.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # asyncio has bytes
        """Parse received data.

        Raise the errors of httptools. HttpParserUpgrade is raised only for a request that offers an
        upgrade and has no body.
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
    """Receiver of the second parser's callbacks.

    Callbacks for the artificial head are dropped. All later callbacks are forwarded to `events`.
    """

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
