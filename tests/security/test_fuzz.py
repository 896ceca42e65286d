"""Arbitrary bytes as requests: an HTTP error or a closed connection, never a 500 or a hang."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from pydantic import BaseModel

from gateway.api.openai.parameter_table import HINTS, NOT_SERVED
from gateway.api.openai.renamed_parameters import RENAMED
from gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.api.tokens import DetokenizeRequest, TokenizeRequest
from ops.commands.up import DEMO_MODEL
from tests.support.in_process import running
from tests.support.local_stack import Stack, Up
from tests.support.patience import PATIENCE_S
from tests.support.raw_http import Answer, answers, connect

pytestmark = pytest.mark.slow

CHATTY = {"role": "user", "content": "Repeat: 你好，世界！😀🎉 こんにちは"}
SECONDS = 60  # longer than the gateway's header timeout
FUZZ = settings(
    max_examples=150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/adapters"]
PATHS += [
    "/v1/models",
    "/v1/models/x",
    "/health/live",
    "/metrics",
    "/openapi.json",
    "*",
    "//",
    "/%",
]
TOKEN = st.text(st.characters(codec="latin-1"), max_size=12)
BYTES = st.binary(max_size=40)
KNOWN = [
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "upgrade",
    "expect",
    "content-type",
    "te",
    "content-encoding",
    "authorization",
    "x-request-id",
    "origin",
]
TYPICAL = [
    "0",
    "1",
    "5",
    "-1",
    "chunked",
    "identity",
    "close",
    "keep-alive",
    "upgrade",
    "h2c",
    "websocket",
    "100-continue",
    "gzip",
    "application/json",
    "multipart/form-data",
    "multipart/form-data;boundary=b",
]
NAMES, VALUES = st.sampled_from(KNOWN), st.sampled_from(TYPICAL)
LINES = st.builds(
    lambda name, colon, value, end: name + colon + value + end,
    NAMES | TOKEN,
    st.sampled_from([": "] * 8 + [":", " : ", "", ":\t"]),
    VALUES | TOKEN,
    st.sampled_from(["\r\n"] * 12 + ["\n", "\r", "\r\n ", "\0\r\n"]),
)

HEADS = st.builds(
    lambda method, path, version, lines: f"{method} {path} {version}\r\n{''.join(lines)}\r\n",
    st.sampled_from(["GET", "POST", "DELETE", "OPTIONS", "PUT", "CONNECT"]) | TOKEN,
    st.sampled_from(PATHS) | TOKEN,
    st.sampled_from(["HTTP/1.1"] * 8 + ["HTTP/1.0", "HTTP/2.0", "HTTP/1.1 ", ""]),
    st.lists(LINES, max_size=6).map(lambda lines: ["host: x\r\n", *lines]),
).map(lambda head: head.encode("latin-1"))
# Only one request per connection, so it is known which answer has no body.
HEAD = st.builds(
    lambda path, lines: f"HEAD {path} HTTP/1.1\r\nhost: x\r\n{''.join(lines)}\r\n".encode(),
    st.sampled_from(PATHS),
    st.lists(st.builds(lambda name, value: f"{name}: {value}\r\n", NAMES, VALUES), max_size=6),
)
CHUNKS = st.builds(
    lambda size, end, data: size.encode() + end + data + b"\r\n",
    st.sampled_from(["0", "1", "2", "a", "ffffffffffffffff", "-1", "1;a=b", " 1", "0x1"]),
    st.sampled_from([b"\r\n"] * 5 + [b"\n"]),
    BYTES,
)
WIRE = st.lists(HEADS | CHUNKS | BYTES, min_size=1, max_size=5).map(b"".join)


def _exchange(stack: Stack, data: bytes, cuts: list[int]) -> bytes:
    """Send `data` in pieces, and return all bytes that the server sends until it closes."""
    said = b""
    with connect(stack.gateway, timeout_s=SECONDS) as connection:
        try:
            edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
            for start, end in pairwise(edges):
                connection.sendall(data[start:end])
            with contextlib.suppress(OSError):  # the server may have closed the connection already
                connection.shutdown(1)
            while piece := connection.recv(65536):
                said += piece
        except (BrokenPipeError, ConnectionResetError):
            pass
    return said.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")


def _check(answer: Answer) -> None:
    assert answer.status < 500
    assert answer.headers["x-request-id"]
    if answer.status >= 400 and answer.body:
        error = json.loads(answer.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}


@settings(FUZZ, max_examples=80)
@given(WIRE, st.lists(st.integers(0, 10_000), max_size=3))
def test_any_bytes(stack: Stack, data: bytes, cuts: list[int]) -> None:
    for answer in answers(_exchange(stack, data, cuts)):
        _check(answer)
        assert answer.status < 400 or answer.body
    assert httpx.get(f"{stack.gateway}/health/live", timeout=PATIENCE_S).status_code == 200


@settings(FUZZ, max_examples=40)
@given(HEAD, st.lists(st.integers(0, 10_000), max_size=3))
def test_any_head_request(stack: Stack, data: bytes, cuts: list[int]) -> None:
    """Check that an answer to HEAD has the Content-Length of a body that is not sent."""
    if said := _exchange(stack, data, cuts):
        head, end, body = said.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        # If the head was invalid, the server did not know that the method is HEAD, and sent a body.
        [answer] = answers(head + end + (body or b" " * length))
        _check(replace(answer, body=body))
    assert httpx.get(f"{stack.gateway}/health/live", timeout=PATIENCE_S).status_code == 200


# Limits of the tensor types, and numbers that lose precision in a conversion.
EDGES = [0, -0.0, -1, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64]
EDGES += [-(2**31) - 1, -(2**63), -(2**63) - 1, 1e-320, 3.5e38, 1.7e308, -1.7e308]
NESTED = [[], {}, [[]], {"": {}}, [None], [1] * 300, ["x"] * 300, "x" * 3000, "\0", [[1], [2]]]
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=8) | st.sampled_from(EDGES + NESTED),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=12,
)
MODELS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
FIELDS = {name for model in MODELS.values() for name in model.model_fields}
REQUESTS = st.dictionaries(
    st.sampled_from(sorted(FIELDS | NOT_SERVED.keys() | HINTS | RENAMED.keys() | {"options"})),
    JSON,
    max_size=5,
)


def _refused_or_served(answer: httpx.Response, sent: object) -> None:
    assert answer.status_code < 500, (sent, answer.text)
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@settings(FUZZ, max_examples=100)
@given(st.sampled_from(PATHS[:4]), REQUESTS, st.sampled_from([None, "role", "text"]), BYTES)
def test_any_json(
    stack: Stack, path: str, wanted: dict[str, Any], good: str | None, tail: bytes
) -> None:
    """Check fields with random values. Two of three requests also have valid fields.

    Requests without valid fields may end with random bytes.
    """
    base: dict[str, Any] = {} if good is None else {"model": "demo", "max_tokens": 1}
    if good and "chat" in path:
        base["messages"] = [{"role": "user", "content": "x"}]
    elif good and path != "/detokenize":
        base["prompt"] = "x"
    fields = base | wanted if path.startswith("/v1") else wanted
    fields |= {"max_tokens": 1} if path.startswith("/v1") and type(wanted.get("n")) is int else {}
    content = json.dumps(fields).encode() + (tail if good is None else b"")
    answer = httpx.post(stack.gateway + path, content=content, timeout=SECONDS)
    _refused_or_served(answer, fields)


def _numbers(model: type[BaseModel]) -> list[str]:
    """Return the names of the parameters that accept numbers."""
    properties = model.model_json_schema()["properties"]
    kinds = {
        name: {kind.get("type") for kind in field.get("anyOf", [field])}
        for name, field in properties.items()
    }
    return [name for name, found in kinds.items() if found & {"integer", "number"}]


@pytest.mark.parametrize("mode", ["token", "text"])
async def test_every_number_at_the_edges_of_its_type(
    stack: Stack, tmp_path: Path, mode: str
) -> None:
    """Check that each extreme number is served by the engine or refused with the allowed range."""
    short: dict[str, Any] = {"model": "demo", "max_tokens": 1, "stop": ["a", "e", "i", " "]}
    good = {
        "/v1/chat/completions": short | {"messages": [{"role": "user", "content": "x"}]},
        "/v1/completions": short | {"prompt": "x"},
    }
    settings = {"tokenizer_dir": DEMO_MODEL, "model_name": "demo", "max_seq_len": None}
    at_once = asyncio.Semaphore(8)
    async with running(tmp_path, stack.triton_grpc, triton_mode=mode, **settings) as (client, _, _):

        async def ask(path: str, sent: dict[str, Any]) -> None:
            async with at_once:
                answer = await client.post(path, json=sent, timeout=120)
            _refused_or_served(answer, sent)

        async with asyncio.TaskGroup() as tasks:
            for path, base in good.items():
                assert (await client.post(path, json=base, timeout=120)).status_code == 200
                for name, number in product(_numbers(MODELS[path]), EDGES):
                    sent = base | {name: number}
                    if number >= 2**31 and name != "max_tokens":
                        del sent["max_tokens"]  # it would limit some of them first
                    tasks.create_task(ask(path, sent))


NAMED = st.sampled_from(["zh", "nothing", "a/b", "", "..", "zh@", "@", "x" * 300, "\0", "\ud7ff"])
PART = NAMED | st.text(max_size=8)
CALLS = st.dictionaries(
    st.sampled_from(["lora_name", "lora_path", "base_model_name", "load_inplace", "lora_int_id"])
    | st.just("version"),
    JSON | PART,
    max_size=4,
)
UPLOADS = st.lists(
    st.tuples(
        st.sampled_from(["name", "base", "file", "x"]),
        st.sampled_from([None, "adapter_config.json", "model.lora_config.npy"]) | PART,
        BYTES,
    ),
    max_size=4,
)


@settings(FUZZ, max_examples=60)
@given(st.sampled_from(["load_lora_adapter", "unload_lora_adapter", "adapters"]), PART, CALLS)
def test_any_call_of_an_admin(stack: Stack, up: Up, path: str, name: str, wanted: Any) -> None:
    """Check arbitrary input for admin routes, with names for which nothing can change."""
    if path == "adapters":
        path = f"adapters/{quote(name, safe='')}/rollback"
    key = (up.state_dir / "admin_key").read_text(encoding="utf-8")
    answer = httpx.post(
        f"{stack.gateway}/v1/{path}",
        content=json.dumps(wanted),
        headers={"authorization": f"Bearer {key}"},
        timeout=SECONDS,
    )
    assert answer.status_code >= 400
    _refused_or_served(answer, wanted)


@settings(FUZZ, max_examples=40)
@given(UPLOADS)
def test_any_upload(stack: Stack, up: Up, parts: list[tuple[str, str | None, bytes]]) -> None:
    key = (up.state_dir / "admin_key").read_text(encoding="utf-8")
    files = [(field, (filename, content)) for field, filename, content in parts]
    answer = httpx.post(
        f"{stack.gateway}/v1/adapters",
        files=[("name", (None, b"fuzzed")), ("base", (None, b"demo")), *files],
        headers={"authorization": f"Bearer {key}"},
        timeout=SECONDS,
    )
    assert answer.status_code >= 400
    _refused_or_served(answer, parts)


@pytest.fixture(scope="module")
def streamed(stack: Stack) -> bytes:
    body = {"model": "demo", "messages": [CHATTY], "temperature": 0, "stream": True}
    return httpx.post(f"{stack.gateway}/v1/chat/completions", json=body, timeout=60).content


@given(st.data())
def test_a_stream_reads_the_same_however_it_is_cut(streamed: bytes, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(streamed)), max_size=40).map(sorted))

    def pieces() -> Iterator[bytes]:
        for start, end in pairwise([0, *cuts, len(streamed)]):
            yield streamed[start:end]

    events = [event.data for event in SSEDecoder().iter_bytes(pieces())]
    assert events.pop() == "[DONE]"
    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    text = "".join(delta.get("content") or "" for delta in deltas)
    assert "你好，世界！😀🎉 こんにちは" in text
