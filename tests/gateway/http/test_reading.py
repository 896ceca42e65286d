"""Reading of requests: any split of the bytes gives the same request as h11 reads, or an error.

A fake transport replaces the socket, so thousands of requests a second arrive in given pieces.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import h11
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.server import ServerState

from gateway.api.failures import build_response
from gateway.http.connections import Connections
from gateway.http.protocol import ConnectionLimits, HttpProtocol
from tests.support.examples import scale_examples
from tests.support.http_wire import GET, ODD, Wire

LENGTH = b"POST /a%20b?c=d HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\nA: b\r\n\r\nhello world"
CHUNKED = (
    b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nA: b\r\n\r\n"
    b"5\r\nhello\r\n6;e=f\r\n world\r\n0\r\nT: u\r\n\r\n"
)
OLD = b"POST /a HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello"
OFFER = LENGTH.replace(b"A: b", b"Connection: upgrade\r\nUpgrade: h2c")
WAITS = LENGTH.replace(b"A: b", b"Expect: 100-continue")
HEAD = GET.replace(b"GET", b"HEAD")
WHOLE = [LENGTH, CHUNKED, GET, OLD, OFFER, WAITS, HEAD, GET + CHUNKED, CHUNKED + LENGTH]


class Reading:
    """The requests that the application received, and the bytes that the server wrote."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.wire: Wire

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        request = {name: scope[name] for name in ("method", "raw_path", "query_string")}
        request |= {"headers": scope["headers"], "body": body}
        self.asked.append(request)
        told = json.dumps(request, default=bytes.hex).encode()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": told})

    async def of(self, pieces: list[bytes], *, at_once: bool) -> Reading:
        """Send the pieces. If `at_once`, the application does not run between the pieces."""
        state = ServerState()
        protocol = HttpProtocol(
            uvicorn.Config(self.app),
            state,
            {},
            app=self.app,
            limits=ConnectionLimits(),
            connections=Connections(8),
            build_error=build_response,
        )
        self.wire = Wire(protocol)
        for piece in pieces:
            if not self.wire.closed:
                protocol.data_received(piece)
            if not at_once:
                await _settled()
        await _settled()
        for task in list(state.tasks):
            task.cancel()
        return self

    @property
    def told(self) -> bytes:
        """The written bytes, without the random request ids."""
        lines = self.wire.written.split(b"\r\n")
        return b"\r\n".join(line for line in lines if not line.startswith(b"x-request-id: "))


async def _settled() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


def _read(pieces: list[bytes], *, at_once: bool) -> Reading:
    return asyncio.run(Reading().of(pieces, at_once=at_once))


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Draw one or two complete requests, possibly with damaged bytes."""
    data = draw(st.sampled_from(WHOLE))
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(data)))
        end = begin + draw(st.sampled_from([0, 0, 0, 1, 2, 7]))
        data = data[:begin] + draw(st.sampled_from([*ODD, b""])) + data[end:]
    return data


CUTS = st.lists(st.integers(0, 400), max_size=8)


def _cut(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@given(requests(), CUTS)
@scale_examples(4)
def test_cuts_change_nothing(data: bytes, cuts: list[int]) -> None:
    whole, pieces = _read([data], at_once=True), _read(_cut(data, cuts), at_once=True)
    assert (whole.told, whole.asked) == (pieces.told, pieces.asked)


@given(requests(), CUTS)
@scale_examples(4)
def test_pauses_change_nothing_of_what_comes_first(data: bytes, cuts: list[int]) -> None:
    """Later requests are read after the answer to the first one, so only the first must agree."""
    whole, pieces = _read([data], at_once=True), _read(_cut(data, cuts), at_once=False)
    assert len(whole.asked) <= 1
    assert whole.asked == pieces.asked[: len(whole.asked)]


@given(requests())
@scale_examples(4)
def test_another_reader_of_it_understands_the_same(data: bytes) -> None:
    other = _others(data)
    for ours in _read([data], at_once=True).asked:
        if other is not None:
            assert ours == other


def _others(data: bytes) -> dict[str, Any] | None:
    """Return the first request as h11 reads it, or None if it is invalid or incomplete for h11."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    body, head = b"", None
    try:
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            else:
                return None
    except h11.RemoteProtocolError:
        return None
    assert head is not None
    # Add a host, as urlsplit would take the start of a path with two slashes for the host.
    target = urlsplit(b"//x" + head.target if head.target.startswith(b"/") else head.target)
    return {
        "method": head.method.decode(),
        "raw_path": target.path,
        "query_string": target.query,
        "headers": list(head.headers),
        "body": body,
    }
