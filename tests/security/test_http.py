"""HTTP requests that a proxy and the gateway could read differently: refused, then closed."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.local_stack import Stack
from tests.support.patience import PATIENCE_S
from tests.support.raw_http import HOST, Answer, answers, connect, next_answer, post, receive_all

POST = b"POST /detokenize HTTP/1.1\r\n" + HOST
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
LIVE = b"GET /health/live HTTP/1.1\r\n" + HOST + b"\r\n"
LAST = b"GET /health/live HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n"
BODY = b'{"tokens": [1]}'
# An upgrade offer as java.net.http sends it.
OFFER = [
    b"connection: Upgrade, HTTP2-Settings",
    b"http2-settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAABgAGAAA",
    b"upgrade: h2c",
]


def _sent(stack: Stack, *pieces: bytes, answered: int = 0) -> list[Answer]:
    """Send the pieces, and return all answers until the server closes.

    After each of the first `answered` pieces, wait for its answer: the server reads no pipelined
    request before that.
    """
    with connect(stack.gateway) as connection:
        found = []
        for number, piece in enumerate(pieces):
            connection.sendall(piece)
            if number < answered:
                found.append(next_answer(connection))
            else:
                time.sleep(0.05)  # separate from the next piece
        return found + answers(receive_all(connection))


def _head(*lines: bytes) -> bytes:
    return POST + b"".join(line + b"\r\n" for line in lines) + b"\r\n"


SMUGGLED = {
    "equal lengths": _head(b"content-length: 1", b"content-length: 1") + b"a",
    "other lengths": _head(b"content-length: 1", b"content-length: 44") + b"a",
    "list of lengths": _head(b"content-length: 1, 1") + b"a",
    "signed length": _head(b"content-length: +1") + b"a",
    "hexadecimal length": _head(b"content-length: 0x1") + b"a",
    "length with a space": _head(b"content-length: 1 1") + b"a",
    "empty length": _head(b"content-length: "),
    "endless length": _head(b"content-length: " + b"9" * 30),
    "length, then chunked": _head(b"content-length: 5", b"transfer-encoding: chunked")
    + b"0\r\n\r\n",
    "chunked, then length": _head(b"transfer-encoding: chunked", b"content-length: 5")
    + b"0\r\n\r\n",
    "identity": _head(b"transfer-encoding: identity"),
    "gzip and chunked": _head(b"transfer-encoding: gzip, chunked") + b"0\r\n\r\n",
    "chunked and gzip": _head(b"transfer-encoding: chunked, gzip") + b"0\r\n\r\n",
    "chunked twice": _head(b"transfer-encoding: chunked", b"transfer-encoding: chunked")
    + b"0\r\n\r\n",
    "gzip, then chunked": _head(b"transfer-encoding: gzip", b"transfer-encoding: chunked")
    + b"0\r\n\r\n",
    "xchunked": _head(b"transfer-encoding: xchunked") + b"0\r\n\r\n",
    "vertical tab": _head(b"transfer-encoding: \x0bchunked") + b"0\r\n\r\n",
    "chunked in 1.0": CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n",
    "space before colon": _head(b"content-length : 1") + b"a",
    "space before name": b"GET /health/live HTTP/1.1\r\n " + HOST + b"\r\n",
    "folded line": _head(b"a: b", b" c"),
    "folded by a tab": _head(b"a: b", b"\tc"),
    "bare LF": LIVE.replace(b"\r\n", b"\n"),
    "bare LF in a header": _head(b"a: b\nc: d"),
    "bare CR in a header": _head(b"a: b\rc: d"),
    "NUL in a value": _head(b"a: b\0c"),
    "no colon": _head(b"abc"),
    "no name": _head(b": b"),
    "name that is not ASCII": _head(b"\xe9: b"),
    "bare LF after a size": CHUNKED + b"1\n{\r\n0\r\n\r\n",
    "bare LF after an extension": CHUNKED + b"1;a\n{\r\n0\r\n\r\n",
    "bare LF after a chunk": CHUNKED + b"1\r\n{\n0\r\n\r\n",
    "more than the size": CHUNKED + b"1\r\n{}\r\n0\r\n\r\n",
    "prefixed size": CHUNKED + b"0x1\r\n{\r\n0\r\n\r\n",
    "negative size": CHUNKED + b"-1\r\n{\r\n0\r\n\r\n",
    "size with a space": CHUNKED + b"1 \r\n{\r\n0\r\n\r\n",
    "size past 64 bits": CHUNKED + b"1" + b"0" * 16 + b"\r\n{",
    "no size": CHUNKED + b"\r\n{",
    "length as a trailer": CHUNKED + b"0\r\ncontent-length: 5\r\n\r\n",
    "HTTP/0.9": b"GET /health/live\r\n\r\n",
    "HTTP/1.2": LIVE.replace(b"1.1", b"1.2"),
    "HTTP/2.0": LIVE.replace(b"1.1", b"2.0"),
    "no host": LIVE.replace(HOST, b""),
    "two hosts": _head(b"host: y"),
    "two keys": _head(b"authorization: Bearer a", b"authorization: Bearer b"),
    "two keys of Anthropic's": _head(b"x-api-key: a", b"x-api-key: b"),
    "two types": _head(b"content-type: text/xml", b"content-type: application/json"),
    "upgrade with a length and chunks": _head(
        *OFFER, b"content-length: 1", b"transfer-encoding: chunked"
    ),
    "upgrade with two lengths": _head(*OFFER, b"content-length: 1", b"content-length: 2"),
    "upgrade with another coding": _head(*OFFER, b"transfer-encoding: gzip, chunked"),
    "upgrade with a wrong size": _head(*OFFER, b"transfer-encoding: chunked") + b"x\r\n",
    "a tunnel with a body": b"CONNECT x:1 HTTP/1.1\r\n" + HOST + b"content-length: 1\r\n\r\na",
}


@pytest.fixture(scope="module")
def smuggled(stack: Stack) -> dict[str, tuple[list[Answer], list[Answer]]]:
    """Return for each request its answers alone and after a valid request. All run at once."""

    def send(name: str) -> tuple[list[Answer], list[Answer]]:
        alone = _sent(stack, SMUGGLED[name] + LAST)
        return alone, _sent(stack, LIVE, SMUGGLED[name], LAST, answered=1)

    with ThreadPoolExecutor(16) as pool:
        return dict(zip(SMUGGLED, pool.map(send, SMUGGLED), strict=True))


@pytest.mark.parametrize("name", SMUGGLED)
def test_what_can_be_read_in_two_ways_is_refused(
    smuggled: dict[str, tuple[list[Answer], list[Answer]]], name: str
) -> None:
    """Check that one 400 closes the connection, so a smuggled second request is never served."""
    [answer], (first, second) = smuggled[name]
    assert (first.status, second.status) == (200, 400)
    assert (answer.status, answer.headers["connection"]) == (400, "close")
    assert json.loads(answer.body)["error"]["type"] == "invalid_request_error"


def test_what_is_plain_is_served(stack: Stack) -> None:
    chunks = CHUNKED + b"%x;a=b\r\n%b\r\n0\r\na: b\r\n\r\n" % (len(BODY), BODY)
    old = b"GET /health/live HTTP/1.0\r\n\r\n"
    whole = b"GET http://x/health/live HTTP/1.1\r\n" + HOST + b"\r\n"
    pieces = [b"\r\n" + LIVE, post("/detokenize", BODY), chunks, whole, old]
    found = _sent(stack, *pieces, answered=len(pieces))
    assert [answer.status for answer in found] == [200] * 5


def test_a_trailer_is_no_header(stack: Stack) -> None:
    """Check that a key in a trailer is ignored: a proxy does not check trailers."""
    chunks = POST.replace(b"detokenize", b"v1/adapters") + b"transfer-encoding: chunked\r\n\r\n"
    trailer = b"0\r\nauthorization: Bearer wrong\r\n\r\n"
    [answer] = _sent(stack, chunks + trailer + LAST)
    assert answer.status == 401
    assert "didn't provide" in json.loads(answer.body)["error"]["message"]


def test_an_offer_of_another_protocol_is_ignored(stack: Stack) -> None:
    """Check that an upgrade offer with a body is served, and that its body is no request."""
    chunks = _head(*OFFER, b"transfer-encoding: chunked") + b"%x\r\n%b\r\n0\r\n\r\n"
    inside = b'{"tokens": [1], "text": "' + LIVE.replace(b"\r\n", b" ") + b'"}'
    pieces = [
        post("/detokenize", BODY, *OFFER),
        chunks % (len(BODY), BODY),
        post("/detokenize", inside, *OFFER),
        LIVE,
        post("/detokenize", BODY, *OFFER, b"expect: something else"),
    ]
    found = _sent(stack, *pieces, LAST, answered=len(pieces))
    assert [answer.status for answer in found] == [200, 200, 400, 200, 200, 200]


def test_what_follows_an_upgrade_is_not_read(stack: Stack) -> None:
    upgrade = LIVE[:-2] + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"
    for pieces in ([upgrade + LAST], [upgrade, LAST]):
        [answer] = _sent(stack, *pieces)
        assert (answer.status, answer.headers["connection"]) == (200, "close")


def test_requests_behind_one_that_runs_are_not_queued(stack: Stack) -> None:
    """Check that the first request is answered, and the connection closed, despite pipelining."""
    body = json.dumps({"model": "demo", "prompt": "Once", "max_tokens": 20, "ignore_eos": True})
    first = post("/v1/completions", body.encode())
    for behind in (LIVE * 5000, b"\0garbage", b"GET / HTTP/9.9\r\n\r\n"):
        [answer] = _sent(stack, first + behind)
        assert answer.status == 200, behind[:20]
        assert answer.headers["connection"] == "close"
        assert json.loads(answer.body)["usage"]["completion_tokens"] == 20


def test_an_answer_before_the_body_ends(stack: Stack) -> None:
    """Check that the rest of a refused body is skipped and not read as a request."""
    key = b"authorization: Bearer wrong"
    request = post("/v1/adapters", LIVE * 100, key)
    head, body = request[: -len(LIVE) * 100], request[-len(LIVE) * 100 :]
    first, second = _sent(stack, head, body, LAST, answered=1)
    assert (first.status, second.status) == (401, 200)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_last_answer_before_the_body_ends(stack: Stack, version: bytes) -> None:
    """Check that an early answer arrives before the connection closes.

    A TCP reset would discard the answer. nginx sends such requests to its backends.
    """
    size = 50_000_000
    head = _head(b"connection: close", b"content-length: %d" % size)
    with connect(stack.gateway) as connection:
        connection.sendall(head.replace(b"1.1", version))
        for _ in range(50):
            connection.sendall(b"x" * (size // 50))
        told = b""
        while piece := connection.recv(65536):
            told += piece
    [answer] = answers(told)
    assert answer.status == 413


def test_a_body_in_another_coding_is_not_unpacked(stack: Stack) -> None:
    for coding in ("deflate", "br", "zstd", "gzip, identity", "gzip, gzip"):
        headers = {"content-encoding": coding}
        answer = httpx.post(
            f"{stack.gateway}/detokenize", content=BODY, headers=headers, timeout=PATIENCE_S
        )
        assert answer.status_code == 415


def test_only_who_can_take_it_is_told_to_continue(stack: Stack) -> None:
    """Check that HTTP/1.0 clients get no `100 Continue`, which they would take for the answer."""
    wanted = post("/detokenize", BODY, b"expect: 100-continue", b"connection: close")
    head, body = wanted[: -len(BODY)], wanted[-len(BODY) :]
    for version, lines in ((b"1.1", [b"HTTP/1.1 100 Continue"]), (b"1.0", [])):
        with connect(stack.gateway) as connection:
            connection.sendall(head.replace(b"HTTP/1.1", b"HTTP/" + version))
            said = b""
            if lines:
                while not said.endswith(b"\r\n\r\n"):
                    said += (byte := connection.recv(1))
                    assert byte, said
            else:
                time.sleep(0.5)  # time for an interim answer, which must not come
            connection.sendall(body)
            said += receive_all(connection)
        assert said.split(b"\r\n")[: len(lines)] == lines
        assert said.count(b"HTTP/1.1 100") == len(lines)
        assert said.count(b"HTTP/1.1 200 OK") == 1
