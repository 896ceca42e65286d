"""Reads requests, also those with a body that offer to go on in another protocol.

A server may ignore such an offer (RFC 9110, 7.8), as this one does. java.net.http, on which many
Java clients stand, makes one (h2c) with each request that it sends without TLS. httptools takes all
that follows such a head for the other protocol, whatever the head says of a body. So the body is
read by a second parser, which is given a head first that says the same of the body and no more.
"""

from __future__ import annotations

from typing import Protocol

from httptools import HttpParserUpgrade, HttpRequestParser


class Events(Protocol):
    """What httptools calls, and what `RequestParser` asks and sets."""

    parser: HttpRequestParser
    """The parser that is to be given what comes next."""

    framing: tuple[bytes, bytes] | None
    """Of a head that made an offer: the header that tells its body's end, if there is a body."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class RequestParser(HttpRequestParser):
    """Puts another parser in its place where it cannot go on itself."""

    __slots__ = ("_events",)

    def __init__(self, events: Events, head: _Head | None = None) -> None:
        super().__init__(head or events)
        self._events = events
        # A second request may come behind one that asked to close: it gets no answer (uvicorn).
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # asyncio has bytes
        """Raises what httptools does; HttpParserUpgrade only where no body follows the offer."""
        try:
            super().feed_data(data)
        except HttpParserUpgrade as offer:
            if self._events.framing is None:
                raise
            head = b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n" % self._events.framing
            self._events.framing = None
            parser = self._events.parser = RequestParser(self._events, _Head(self._events))
            parser.feed_data(head)
            parser.feed_data(data[offer.args[0] :])


class _Head:
    """Keeps a parser's first head from whom its events are for."""

    def __init__(self, events: Events) -> None:
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
