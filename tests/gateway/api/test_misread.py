"""Requests over HTTP that a lenient server would silently misread."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

CHAT, MESSAGES, COUNT = "/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    MESSAGES: {"messages": [USER], "max_tokens": 5},
    COUNT: {"messages": [USER]},
    "/tokenize": {"messages": [USER]},
}
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
OTHER = {"type": "json_schema", "schema": SCHEMA | {"required": []}}


@pytest.fixture
def engine(tmp_path: Path) -> FakeTriton:
    save_tokenizer(tmp_path)
    return FakeTriton(tokens=ids_of(tmp_path, "hello"), fault=None, step=0)


@pytest.fixture
async def client(tmp_path: Path, engine: FakeTriton) -> AsyncIterator[httpx.AsyncClient]:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson }}<tool_call>"
    config = {"eos_token": "!", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    async with (
        serving(engine) as address,
        running(tmp_path, address, max_seq_len=4096, tool_form="hermes") as (client, _, _),
    ):
        yield client


async def _ask(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    return await client.post(path, json={"model": "m"} | BODIES[path] | fields)


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    ("tool", "where", "advice"),
    [
        ({"type": "function", "function": FUNCTION}, "tools.1:", "name, description and input_s"),
        ({"type": "functon", "function": FUNCTION}, "tools.1:", "OpenAI's form"),
        ({"function": FUNCTION}, "tools.1:", "OpenAI's form"),
        ({"type": "function", "name": "f", "parameters": {}}, "tools.1:", "OpenAI's form"),
        ({"type": "functon", "name": "f"}, "tools.1.type:", "did you mean custom"),
        ({"type": "Custom", "name": "f"}, "tools.1.type:", "did you mean custom"),
    ],
)
async def test_a_tool_of_another_form_is_refused(
    client: httpx.AsyncClient, path: str, tool: dict[str, Any], where: str, advice: str
) -> None:
    own = {"name": "g", "input_schema": {"type": "object"}}
    answer = await _ask(client, path, tools=[own, tool])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(where)
    assert advice in error["message"]


async def test_the_beta_name_of_a_format_is_the_format(
    client: httpx.AsyncClient, engine: FakeTriton
) -> None:
    for fields in (
        {"output_format": FORMAT},
        {"output_format": FORMAT, "output_config": {"format": FORMAT}},
        {"output_format": FORMAT, "output_config": {"effort": "low"}},
    ):
        answer = await _ask(client, MESSAGES, **fields)
        assert answer.status_code == 200, answer.text
        assert "x-ignored-parameters" not in answer.headers
        assert "guided_decoding_guide" in [each.name for each in engine.requests[-1].inputs]
    both = {"output_format": OTHER, "output_config": {"format": FORMAT}}
    for path in (MESSAGES, COUNT):
        answer = await _ask(client, path, **both)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith("output_format: found another format than output_config.format")


async def test_a_format_has_the_name_that_the_client_gave_it(client: httpx.AsyncClient) -> None:
    wrong = {"type": "json_schema", "schema": {"type": "object", "not": {}}}
    for name, fields in (
        ("output_format", {"output_format": wrong}),
        ("output_config.format", {"output_config": {"format": wrong}}),
    ):
        answer = await _ask(client, MESSAGES, **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"{name}: cannot be enforced")


async def test_a_chat_refuses_that_name(client: httpx.AsyncClient) -> None:
    answer = await _ask(client, CHAT, output_format=FORMAT)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "output_format"


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize("role", ["user", "system", "developer", "tool", "assistant"])
@pytest.mark.parametrize("said", [{}, {"contents": "hi"}, {"content": None}])
async def test_a_message_says_something(
    client: httpx.AsyncClient, path: str, role: str, said: dict[str, Any]
) -> None:
    if role == "assistant" and "content" in said:
        return  # see the next test
    answer = await _ask(client, path, messages=[USER, {"role": role} | said])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == "messages[1].content"
    found = "null" if "content" in said else "none"
    assert error["message"].startswith(f"messages[1].content: found {found}; a message of role ")


@pytest.mark.parametrize(
    "said",
    [
        {"content": None},  # a gateway's answer that ended before its content
        {"content": ""},
        {"refusal": "No."},
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm.", "content": None},
        {"tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}]},
    ],
)
async def test_an_assistant_may_say_it_otherwise(
    client: httpx.AsyncClient, said: dict[str, Any]
) -> None:
    answer = await _ask(client, CHAT, messages=[USER, {"role": "assistant"} | said, USER])
    assert answer.status_code == 200, answer.text
