"""Requests that offer an upgrade to another protocol are read like those without the offer."""

from __future__ import annotations

from typing import Any

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.head import find_framing
from gateway.http.parser import RequestParser

OFFER = b"connection: upgrade\r\nupgrade: h2c\r\n"
_FIELDS = {b"connection", b"upgrade"}


class Events:
    """Events of the parser, without the headers of the offer, and with pieces joined."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bytes]] = []
        self.framing: tuple[bytes, bytes] | None = None
        self.parser: Any = RequestParser(self)
        self._headers: list[tuple[bytes, bytes]] = []

    def on_message_begin(self) -> None:
        self._headers = []
        self.told.append(("begin", b""))

    def on_url(self, url: bytes) -> None:
        self._add("url", url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))
        if name not in _FIELDS:
            self.told.append((name.decode(), value))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            self.framing = find_framing(self._headers)

    def on_body(self, body: bytes) -> None:
        self._add("body", body)

    def on_message_complete(self) -> None:
        if self.framing is None:
            self.told.append(("complete", b""))

    def _add(self, what: str, piece: bytes) -> None:
        if self.told[-1][0] == what:
            piece = self.told.pop()[1] + piece
        self.told.append((what, piece))


def _request(body: bytes, chunk: int, fields: bytes) -> bytes:
    head = b"POST /x HTTP/1.1\r\nhost: x\r\n" + fields
    if not chunk:
        return head + b"content-length: %d\r\n\r\n" % len(body) + body
    parts = [body[at : at + chunk] for at in range(0, len(body), chunk)]
    coded = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return head + b"transfer-encoding: chunked\r\n\r\n" + coded + b"0\r\n\r\n"


def _read(requests: list[tuple[bytes, int, bool]], cuts: list[int], *, offers: bool) -> Any:
    data = b"".join(_request(body, size, OFFER * (own and offers)) for body, size, own in requests)
    events = Events()
    ends = sorted({cut % len(data) for cut in cuts} | {len(data)})
    for begin, end in zip([0, *ends], ends, strict=False):
        events.parser.feed_data(data[begin:end])
    return events.told


BODIES = st.binary(min_size=1, max_size=40) | st.just(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")


@given(
    st.lists(st.tuples(BODIES, st.integers(0, 9), st.booleans()), min_size=1, max_size=4),
    st.lists(st.integers(0, 2000), max_size=8),
)
def test_an_offer_changes_nothing(requests: list[tuple[bytes, int, bool]], cuts: list[int]) -> None:
    told = _read(requests, cuts, offers=True)
    assert told == _read(requests, cuts, offers=False)
    assert [what for what, _ in told].count("complete") == len(requests)


def test_what_follows_an_offer_without_a_body_is_not_read() -> None:
    events = Events()
    with pytest.raises(httptools.HttpParserUpgrade):
        events.parser.feed_data(b"GET / HTTP/1.1\r\n" + OFFER + b"\r\nGET /next HTTP/1.1\r\n\r\n")
    assert ("url", b"/next") not in events.told
