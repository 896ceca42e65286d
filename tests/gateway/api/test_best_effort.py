"""Schemas that are not strict: keywords that cannot be enforced are left out and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

ODD = {
    "type": "object",
    "properties": {
        "price": {"type": "number", "multipleOf": 0.01},
        "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "x, y\r\né": {"type": "string", "pattern": "^(?!a)"},
    },
    "required": ["price"],
}
LEFT_OUT = (
    ".price.multipleOf",
    ".tags.uniqueItems",
    r"['x\u002c\u0020y\u005cr\u005cn\u00e9'].pattern",
)
CHAT = {"messages": [{"role": "user", "content": "?"}]}


def _function(**more: Any) -> dict[str, Any]:
    return {"name": "find", "parameters": ODD, **more}


def _format(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": ODD, **more}}


ASKED: list[tuple[str, dict[str, Any], str]] = [
    (
        "/v1/chat/completions",
        CHAT | {"response_format": _format()},
        "response_format.json_schema.schema",
    ),
    (
        "/v1/chat/completions",
        CHAT | {"response_format": _format(strict=False)},
        "response_format.json_schema.schema",
    ),
    (
        "/v1/chat/completions",
        CHAT | {"response_format": {"type": "json_schema", "schema": ODD}},
        "response_format.schema",
    ),
    (
        "/v1/completions",
        {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": ODD}},
        "response_format.json_schema.schema",
    ),
    (
        "/v1/chat/completions",
        CHAT
        | {
            "tools": [{"type": "function", "function": _function()}],
            "tool_choice": "required",
        },
        "tools[0].function.parameters",
    ),
    (
        "/v1/responses",
        {"input": "?", "text": {"format": {"type": "json_schema", "name": "n", "schema": ODD}}},
        "text.format.schema",
    ),
    (
        "/v1/responses",
        {
            "input": "?",
            "tools": [{"type": "function", **_function(strict=False)}],
            "tool_choice": "required",
        },
        "tools[0].parameters",
    ),
    (
        "/v1/messages",
        CHAT
        | {
            "max_tokens": 9,
            "tools": [{"name": "find", "input_schema": ODD}],
            "tool_choice": {"type": "any"},
        },
        "tools.0.input_schema",
    ),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("<tool_call><function={{ messages | length }}>")
    return tmp_path


@pytest.mark.parametrize(("path", "fields", "name"), ASKED)
async def test_what_is_left_out_is_named(
    folder: Path, path: str, fields: dict[str, Any], name: str
) -> None:
    engine = FakeTriton(tokens=ids_of(folder, '{"price": 1}'), fault=None, step=0)
    async with (
        serving(engine) as endpoint,
        running(folder, endpoint, max_seq_len=512) as (client, _, _),
    ):
        answer = await client.post(path, json={"model": "m", **fields})
    assert answer.status_code == 200, answer.text
    left_out = [f"{name}.properties{each}" for each in LEFT_OUT[:2]]
    left_out.append(f"{name}.properties{LEFT_OUT[2]}")
    assert answer.headers["x-ignored-parameters"] == ", ".join(left_out)
    [request] = engine.requests
    guide = request.SerializeToString()
    assert b"uniqueItems" not in guide
    assert b'"type":"number"' in guide


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": _format(strict=True)},
        {"response_format": {"type": "json_schema", "schema": ODD, "strict": True}},
        {"tools": [{"type": "function", "function": _function(strict=True)}]},
    ],
)
async def test_a_strict_schema_is_refused_by_name(folder: Path, fields: dict[str, Any]) -> None:
    choice = {"tool_choice": "required"} if "tools" in fields else {}
    engine = FakeTriton(tokens=[], fault=None, step=0)
    async with serving(engine) as endpoint, running(folder, endpoint) as (client, _, _):
        answer = await client.post(
            "/v1/chat/completions", json={"model": "m", **CHAT, **fields, **choice}
        )
    assert answer.status_code == 400
    assert "multipleOf is not supported" in answer.json()["error"]["message"]
    assert not engine.requests


async def test_strict_parameters_refuse_what_would_be_left_out(folder: Path) -> None:
    engine = FakeTriton(tokens=[], fault=None, step=0)
    async with (
        serving(engine) as endpoint,
        running(folder, endpoint, strict_parameters=True) as (client, _, _),
    ):
        asked = {"model": "m", **CHAT, "response_format": _format()}
        answer = await client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 400
    assert "$.properties.price: multipleOf" in answer.json()["error"]["message"]


FORMATS: list[tuple[dict[str, Any], str | None]] = [
    ({"type": "regex", "regex": "(a|)b"}, "(a)?b"),
    ({"type": "regex", "pattern": "a+"}, "a+"),
    ({"type": "grammar", "grammar": 'root ::= "a"'}, 'root ::= "a"'),
    ({"type": "ebnf", "ebnf": 'root ::= "a"'}, 'root ::= "a"'),
    ({"type": "json"}, '{"type":"object","additionalProperties":{}}'),
    ({"type": "json", "schema": {"type": "null"}}, '{"type":"null"}'),
    ({"type": "json_schema", "schema": {"type": "null"}, "name": "n"}, '{"type":"null"}'),
    ({"type": "json_schema", "json_schema": {"type": "null"}}, '{"type":"null"}'),
    ({"type": "structural_tag", "structures": [], "triggers": []}, None),
    ({"type": "structural_tag"}, None),
]


@pytest.mark.parametrize(("wanted", "guide"), FORMATS)
async def test_formats_of_other_servers_are_guides(
    folder: Path, wanted: dict[str, Any], guide: str | None
) -> None:
    engine = FakeTriton(tokens=ids_of(folder, "a"), fault=None, step=0)
    async with serving(engine) as endpoint, running(folder, endpoint) as (client, _, _):
        asked = {"model": "m", "prompt": "x", "response_format": wanted}
        answer = await client.post("/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    assert "x-ignored-parameters" not in answer.headers
    [request] = engine.requests
    if guide is None:
        assert "guided_decoding_guide" not in [tensor.name for tensor in request.inputs]
    else:
        assert guide.encode() in request.SerializeToString()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"type": "regex"}, "response_format.regex: must be given for type regex"),
        ({"type": "grammar"}, "response_format.grammar: must be given for type grammar"),
        ({"type": "text", "regex": "a"}, "response_format.regex: found with type 'text'"),
        ({"type": "json_schema"}, "response_format.json_schema.schema: must be given once"),
        (
            {"type": "structural_tag", "structures": [{"begin": "<"}], "triggers": ["<"]},
            "response_format: a structural tag is not supported",
        ),
        (
            {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}},
            "response_format: a structural tag is not supported",
        ),
        ({"type": "grammar", "grammar": 'start: "a"'}, "allowed: EBNF, whose rules are written"),
        ({"type": "grammar", "grammar": 'start: "a"'}, "structured-output.md"),
    ],
)
async def test_a_format_that_is_none_is_refused_by_name(
    folder: Path, wanted: dict[str, Any], message: str
) -> None:
    engine = FakeTriton(tokens=[], fault=None, step=0)
    async with serving(engine) as endpoint, running(folder, endpoint) as (client, _, _):
        asked = {"model": "m", "prompt": "x", "response_format": wanted}
        answer = await client.post("/v1/completions", json=asked)
    assert answer.status_code == 400
    error = json.loads(answer.text)["error"]
    path = message.partition(":")[0]
    assert error["param"] == (path if path.startswith("response_format") else "response_format")
    assert message in error["message"]
