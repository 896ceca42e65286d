"""Refused requests with a remembered head are not parsed, but get the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.server import ServerState

from gateway.api.failures import build_response
from gateway.http.connections import Connections
from gateway.http.known_heads import MAX_HEADS, MAX_SEEN, KnownHeads
from gateway.http.protocol import ConnectionLimits, HttpProtocol
from gateway.http.start_gate import RefusalAnswer, StartGate
from gateway.scheduling.start_queue import work_of
from tests.support.http_wire import ODD, Wire

LINES = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nA: b\r\n\r\n"


def post(body: bytes, lines: bytes = LINES) -> bytes:
    return lines % len(body) + body


FIELDS = {b"host": b"x", b"a": b"b"}


def known(*heads: bytes) -> KnownHeads:
    found = KnownHeads()
    for _ in range(2):
        for head in heads:
            found.add(head, "/a", FIELDS | {b"content-length": b"5"})
    return found


@pytest.mark.parametrize("body", [b"", b"hello", b"x" * 70_000])
def test_a_head_is_known_for_bodies_of_every_length(body: bytes) -> None:
    found = known(post(b"hello")).find(post(body))
    assert found is not None
    assert found[0].path == "/a"
    assert found[1] == len(body)


@pytest.mark.parametrize(
    "data",
    [
        post(b"hello")[:-1],
        post(b"hello") + b"x",
        post(b"hello") * 2,
        b"\r\n" + post(b"hello"),
        post(b"hello", LINES.replace(b"A: b", b"A: c")),
        post(b"hello", LINES.replace(b"POST", b"GET")),
        post(b"hello", LINES.replace(b"/1.1", b"/1.0")),
        post(b"hello", LINES.replace(b"\r\nA", b"\nA")),
        post(b"hello", LINES.replace(b"%d", b"+%d")),
        post(b"hello", LINES.replace(b"%d", b"%d ")),
        post(b"hello", LINES.replace(b"%d", b"000000000%d")),
        post(b"hello", LINES.replace(b"%d", b"%d\0")),
        post(b"hello", LINES.replace(b"A: b", b"Transfer-Encoding: chunked")),
    ],
)
def test_other_bytes_are_not_known(data: bytes) -> None:
    assert known(post(b"hello")).find(data) is None


@pytest.mark.parametrize("name", [b"transfer-encoding", b"expect", b"upgrade"])
def test_what_frames_a_body_otherwise_is_not_remembered(name: bytes) -> None:
    heads, data = KnownHeads(), post(b"hello")
    for _ in range(3):
        heads.add(data, "/a", FIELDS | {b"content-length": b"5", name: b"x"})
        heads.add(data, "/a", FIELDS | {b"content-length": b"6"})
    assert heads.find(data) is None


def _numbered(number: int) -> bytes:
    return post(b"hello").replace(b"A: b", b"A: %d" % number)


def test_heads_are_bounded_and_those_of_one_request_are_not_kept() -> None:
    heads, often = KnownHeads(), post(b"hello")
    for number in range(3 * MAX_SEEN):
        heads.add(_numbered(number), "/a", FIELDS | {b"content-length": b"5"})
    assert len(heads) == 0
    heads.add(often, "/a", FIELDS | {b"content-length": b"5"})
    for number in range(3 * MAX_HEADS):
        one = _numbered(number)
        for data in (one, one, often):
            heads.add(data, "/a", FIELDS | {b"content-length": b"5"})
        assert heads.find(often)
    assert len(heads) == MAX_HEADS
    assert heads.find(one)


class Flood:
    """A gate that refuses all requests except those of the key `calm`, and records its calls."""

    waiting = 1

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []
        self.refused: list[tuple[str, dict[bytes, bytes]]] = []
        self.parsed = 0

    def try_begin(self, work: int) -> bool:
        return False

    def find_refusal(self, tenant: str, work: int) -> float | None:
        if tenant == "calm":
            return None
        self.asked.append((tenant, work))
        return 1.0

    def wait(self, tenant: str, work: int, begin: Callable[[], bool]) -> float | None:
        self.parsed += 1
        if (wait_s := self.find_refusal(tenant, work)) is None:
            begin()
        return wait_s

    def may_wait(self, scope: dict[str, Any]) -> bool:
        return scope["path"] != "/health"

    def name_tenant(self, fields: Mapping[bytes, bytes]) -> str:
        return fields.get(b"authorization", b"").decode("latin-1")

    def refuse(
        self, path: str, fields: Mapping[bytes, bytes], tenant: str, wait_s: float
    ) -> RefusalAnswer:
        length = {b"content-length"}
        self.refused.append((path, {n: v for n, v in fields.items() if n not in length}))
        return RefusalAnswer(503, b"content-length: 4\r\n", b"busy")


async def _serve(pieces: list[bytes], *, remembers: bool) -> tuple[Flood, Wire, list[Any]]:
    flood, begun = Flood(), list[Any]()
    gate = StartGate(flood, flood)  # type: ignore[arg-type]  # all of it that is used
    if not remembers:
        gate._heads.add = lambda *_: None  # type: ignore[method-assign]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        begun.append((scope["method"], scope["path"], scope["headers"]))
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"served"})

    protocol = HttpProtocol(
        uvicorn.Config(app),
        ServerState(),
        {},
        app=app,
        limits=ConnectionLimits(),
        connections=Connections(100),
        build_error=build_response,
        gate=gate,
    )
    wire = Wire(protocol)
    for piece in pieces:
        if wire.closed:
            break
        protocol.data_received(piece)
        for _ in range(4):
            await asyncio.sleep(0)
    closed = wire.closed
    wire.close()
    await asyncio.sleep(0)
    wire.closed = closed
    return flood, wire, begun


KEYED = LINES.replace(b"A: b", b"Authorization: calm")
REQUESTS = [
    *(post(b"hello"), post(b""), post(b"x" * 5000), post(b"hello", KEYED)),
    post(b"hello", LINES.replace(b"/a ", b"/health ")),
    post(b"hello", LINES.replace(b"A: b", b"Connection: close")),
    post(b"hello", LINES.replace(b"A: b", b"Expect: 100-continue")),
    post(b"hello", LINES.replace(b"A: b", b"Connection: upgrade\r\nUpgrade: h2c")),
    post(b"hello", LINES.replace(b"1.1", b"1.0")),
    LINES.replace(b"Content-Length: %d", b"Transfer-Encoding: chunked") + b"1\r\nx\r\n0\r\n\r\n",
    b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n",
]


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Draw requests, mostly equal ones and some damaged ones, each alone, joined or split."""
    pieces: list[bytes] = []
    for _ in range(draw(st.integers(1, 12))):
        data = draw(st.one_of(st.just(REQUESTS[0]), st.sampled_from(REQUESTS)))
        if draw(st.integers(0, 5)) == 0:
            at, odd = draw(st.integers(0, min(len(data), 90))), draw(st.sampled_from(ODD))
            data = data[:at] + odd + data[at + draw(st.integers(0, 2)) :]
        how = draw(st.integers(0, 5))
        if how == 0 and pieces:
            pieces[-1] += data
        elif how == 1:
            at = draw(st.integers(0, len(data)))
            pieces += [part for part in (data[:at], data[at:]) if part]
        else:
            pieces.append(data)
    return pieces


def _told(written: bytes) -> bytes:
    """Return the answers without their random request ids."""
    lines = written.split(b"\r\n")
    return b"\r\n".join([line for line in lines if not line.startswith(b"x-request-id")])


@settings(deadline=None, max_examples=400)
@given(streams())
def test_answers_are_those_of_the_parser_whatever_comes(pieces: list[bytes]) -> None:
    known, parsed = (asyncio.run(_serve(pieces, remembers=it)) for it in (True, False))
    assert _told(known[1].written) == _told(parsed[1].written)
    assert (known[1].closed, known[1].ended) == (parsed[1].closed, parsed[1].ended)
    assert known[0].asked == parsed[0].asked
    assert known[0].refused == parsed[0].refused
    assert known[2] == parsed[2]


async def test_a_repeated_head_is_parsed_twice_and_no_more() -> None:
    pieces = [post(b"x" * size) for size in range(50)]
    flood, wire, _ = await _serve([*pieces, post(b"hello", KEYED)], remembers=True)
    assert flood.parsed == 3
    assert len(flood.refused) == 50
    assert wire.written.count(b"503 ") == 50
    assert wire.written.endswith(b"served\r\n0\r\n\r\n")


async def test_a_client_that_takes_no_answers_is_given_no_more() -> None:
    """The connection is closed, because unread answers would pile up in the server's memory."""
    flood, begun = Flood(), list[int]()
    gate = StartGate(flood, flood)  # type: ignore[arg-type]
    protocol = HttpProtocol(
        uvicorn.Config(lambda: None),
        ServerState(),
        {},
        app=lambda: None,  # type: ignore[arg-type,return-value]
        limits=ConnectionLimits(),
        connections=Connections(100),
        build_error=build_response,
        gate=gate,
    )
    wire = Wire(protocol)
    for number in range(50):
        if number == 20:
            protocol.pause_writing()
        protocol.data_received(post(b"hello"))
        if wire.closed:
            begun.append(number)
            break
    assert begun == [20]
    assert wire.written.count(b"503 ") == 21
    assert wire.written.count(b"connection: close") == 1
    assert not protocol._read, "an idle connection has its last request in memory"
    await asyncio.sleep(0)


def test_work_counts_the_body_that_comes_and_not_the_first_one() -> None:
    async def check() -> None:
        pieces = [post(b""), post(b""), post(b"x" * 60_000)]
        flood, _, _ = await _serve(pieces, remembers=True)
        assert [work for _, work in flood.asked] == [1, 1, work_of(60_000)]

    asyncio.run(check())
