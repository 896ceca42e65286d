"""Malformed and hostile request bodies: the server answers 4xx quickly and keeps running."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx
import psutil
import pytest

from tests.support.cpu import costs_less_than
from tests.support.local_stack import Stack, Up
from tests.support.patience import PATIENCE_S
from tests.support.raw_http import connect, next_answer, post

CPU_SECONDS = 1.0  # limit of the gateway's CPU time, upload included; the slowest takes 0.3
MEGABYTES = 8 * 1024 * 1024
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GOOD = {
    CHAT: b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}',
    TEXT: b'{"model": "demo", "prompt": "x", "max_tokens": 1}',
    "/tokenize": b'{"prompt": "x"}',
    "/detokenize": b'{"tokens": [1]}',
}


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error: dict[str, Any] = response.json()["error"]
    assert len(error["message"]) < 3000
    return error


def _post(stack: Stack, path: str, body: bytes, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(stack.gateway + path, content=body, headers=named, timeout=60)


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/vnd.api+json",
        "application/x-www-form-urlencoded",
        "text/plain;charset=UTF-8",
        "",
    ],
)
def test_json_under_any_usual_name(stack: Stack, path: str, content_type: str) -> None:
    assert _post(stack, path, GOOD[path], content_type=content_type).status_code == 200


@pytest.mark.parametrize("path", GOOD)
def test_json_without_a_content_type(stack: Stack, path: str) -> None:
    assert _post(stack, path, GOOD[path]).status_code == 200


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("content_type", ["text/xml", "multipart/form-data; boundary=b", "json"])
def test_a_body_that_is_said_not_to_be_json(stack: Stack, path: str, content_type: str) -> None:
    error = _error(_post(stack, path, GOOD[path], content_type=content_type), 415)
    assert error["code"] == "unsupported_media_type"
    assert content_type.partition(";")[0] in error["message"]


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("coding", ["gzip", "GZip", "x-gzip"])
def test_a_body_in_gzip(stack: Stack, path: str, coding: str) -> None:
    packed = gzip.compress(GOOD[path])
    assert _post(stack, path, packed, content_encoding=coding).status_code == 200


@pytest.mark.parametrize(
    "packed",
    [
        GOOD[TEXT],
        b"",
        gzip.compress(GOOD[TEXT])[:-1],
        gzip.compress(GOOD[TEXT]) + b"{}",
        gzip.compress(b"") + gzip.compress(GOOD[TEXT]),
        zlib.compress(GOOD[TEXT]),
    ],
    ids=["plain", "empty", "cut", "goes on", "two", "deflate"],
)
def test_what_is_not_one_gzip_stream(stack: Stack, packed: bytes) -> None:
    error = _error(_post(stack, TEXT, packed, content_encoding="gzip"), 400)
    assert error["message"].startswith("content-encoding: ")


def test_a_bomb_is_not_unpacked(stack: Stack) -> None:
    """Decompression stops at 8 MB, the limit of a body, although the 64 KB hold 64 MB."""
    bomb = gzip.compress(b" " * (8 * MEGABYTES))
    process = psutil.Process(stack.pids["gateway"])
    with costs_less_than(CPU_SECONDS, stack.pids["gateway"]):
        before = process.memory_info().rss
        _error(_post(stack, TEXT, bomb, content_encoding="gzip"), 413)
        assert process.memory_info().rss < before + 2 * MEGABYTES
    assert _post(stack, TEXT, GOOD[TEXT], content_encoding="identity").status_code == 200


def test_what_is_packed_is_counted_too(stack: Stack) -> None:
    """Empty gzip blocks count towards the limit, although they decompress to nothing."""
    packer = zlib.compressobj(wbits=31)
    nothing = packer.compress(b"") + packer.flush(zlib.Z_SYNC_FLUSH)
    blocks = b"\0\0\0\xff\xff" * 10_000
    short = packer.compress(GOOD[TEXT]) + packer.flush()

    def posted(times: int) -> httpx.Response:
        pieces = iter([nothing, *[blocks] * times, short])
        headers = {"content-encoding": "gzip"}
        return httpx.post(stack.gateway + TEXT, content=pieces, headers=headers, timeout=60)

    assert posted(2).status_code == 200
    _error(posted(MEGABYTES // len(blocks) + 1), 413)


@pytest.mark.parametrize("path", GOOD)
def test_a_body_that_says_it_is_too_large_is_not_waited_for(stack: Stack, path: str) -> None:
    head = post(path, b"").replace(b"length: 0", b"length: 1000000000")
    with connect(stack.gateway) as connection:
        connection.sendall(head)
        answer = next_answer(connection)
    assert answer.status == 413
    assert json.loads(answer.body)["error"]["code"] == "content_too_large"


@pytest.mark.parametrize("content_type", ["text/plain", "multipart/mixed; boundary=b", ""])
def test_an_upload_that_is_not_a_form(stack: Stack, up: Up, content_type: str) -> None:
    key = (up.state_dir / "admin_key").read_text(encoding="utf-8")
    headers = {"authorization": f"Bearer {key}", "content_type": content_type}
    error = _error(_post(stack, "/v1/adapters", b"{}", **headers), 415)
    assert "multipart/form-data" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b\r\nnonsense",
        b'--b\r\ncontent-disposition: form-data; name="name"\r\n\r\n\\ud800\r\n'
        b'--b\r\ncontent-disposition: form-data; name="base"\r\n\r\ndemo\r\n--b--\r\n',
    ],
)
@pytest.mark.parametrize("boundary", ["", "; boundary=b", "; boundary=b; charset=unicode_escape"])
def test_a_form_that_is_broken(stack: Stack, up: Up, body: bytes, boundary: str) -> None:
    key = (up.state_dir / "admin_key").read_text(encoding="utf-8")
    kind = f"multipart/form-data{boundary}"
    headers = {"authorization": f"Bearer {key}", "content_type": kind}
    _error(_post(stack, "/v1/adapters", body, **headers), 400)


def _fields(**fields: bytes) -> bytes:
    members = b"".join(b', "%s": %s' % (name.encode(), value) for name, value in fields.items())
    return b'{"model": "demo", "prompt": "x"' + members + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b"[" * (MEGABYTES - 1),
        b'{"a":' * 100_000,
        _fields(structured_outputs=b'{"json": ' + b'{"a":' * 300 + b"1" + b"}" * 301),
        _fields(metadata=b"[" * 500 + b"]" * 500),
        _fields(max_tokens=b"9" * 1_000_000),
        _fields(seed=b"1e999"),
        _fields(temperature=b"NaN"),
        _fields(temperature=b"-Infinity"),
        _fields(stop=b'"\xff"'),
        _fields(stop=rb'"\ud800"'),
        _fields(prompt=b'"y"'),
        _fields(logit_bias=b'{"' + b"9" * 5000 + b'": 1}'),
        _fields(logit_bias=b'{"1": 1, "1": 2}'),
        _fields(seed=b"9223372036854775808"),
        _fields(repetition_penalty=b"0"),
        b'{"model": "demo", "prompt": [' + b"1," * 4_000_000 + b'"x"]}',
        b'{"model": "demo", "prompt": [' + b'"x",' * 2_000_000 + b'"x"]}',
        b'{"model": "demo", "prompt": [' + b"[1]," * 2_000_000 + b"[1]]}",
        b"{" + b",".join(b'"%d": 1' % n for n in range(500_000)) + b"}",
        b'{"' + b"x" * (MEGABYTES - 100) + b'": 1}',
    ],
    ids=lambda body: repr(body[:80]),
)
def test_a_hostile_completion_is_refused_quickly(stack: Stack, body: bytes) -> None:
    with costs_less_than(CPU_SECONDS, stack.pids["gateway"]):
        _error(_post(stack, TEXT, body), 400)
    assert _post(stack, TEXT, GOOD[TEXT]).status_code == 200


def _message(content: bytes) -> bytes:
    return b'{"model": "demo", "max_tokens": 1, "messages": [' + content + b"]}"


@pytest.mark.parametrize(
    "body",
    [
        _message(b"1," * 4_000_000 + b"1"),
        _message(b"{}," * 2_700_000 + b"{}"),
        _message(b'{"role": "user"},' * 49_000 + b'{"role": "user"}'),
        _message(b'{"role": "user", "content": [' + b"1," * 4_000_000 + b"1]}"),
        _message(
            b'{"role": "user", "name": 1, ' + b",".join(b'"%d": 1' % n for n in range(4000)) + b"}"
        ),
        _message(
            b'{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", '
            b'"arguments": "' + b"[" * 990 + b"]" * 990 + b'"}}]}'
        ),
    ],
    ids=lambda body: repr(body[:80]),
)
def test_a_hostile_chat_is_refused_quickly(stack: Stack, body: bytes) -> None:
    with costs_less_than(CPU_SECONDS, stack.pids["gateway"]):
        _error(_post(stack, CHAT, body), 400)
    assert _post(stack, CHAT, GOOD[CHAT]).status_code == 200


@pytest.mark.parametrize("items", [b"1.5,", b'"x",', b"{},"])
def test_hostile_tokens_are_refused_quickly(stack: Stack, items: bytes) -> None:
    body = b'{"tokens": [' + items * ((MEGABYTES - 100) // len(items)) + b"1]}"
    with costs_less_than(CPU_SECONDS, stack.pids["gateway"]):
        _error(_post(stack, "/detokenize", body), 400)


@pytest.mark.parametrize("path", ["a\0b", "x" * 300, "x/" * 3000, "nowhere"])
def test_a_path_that_cannot_be(stack: Stack, up: Up, path: str) -> None:
    key = (up.state_dir / "admin_key").read_text(encoding="utf-8")
    response = httpx.post(
        f"{stack.gateway}/v1/load_lora_adapter",
        json={"lora_name": "x", "lora_path": path},
        headers={"authorization": f"Bearer {key}"},
        timeout=PATIENCE_S,
    )
    assert _error(response, 400)["param"] == "lora_path"
