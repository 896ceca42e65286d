"""Syntaxes of tool calls, over HTTP, with an engine that generates them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.support.fake_triton import FakeTriton, serving
from tests.support.in_process import ids_of, running, save_tokenizer

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {"isbn": {"type": "string"}, "pages": {"type": "integer"}},
            },
        },
    }
]


def _prompt(folder: Path, request: pb.ModelInferRequest) -> str:
    """Return the prompt that the engine received, as text."""
    names = [tensor.name for tensor in request.inputs]
    raw = request.raw_input_contents[names.index("input_ids")]
    ids = [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]
    known = {ids_of(folder, chr(code))[0]: chr(code) for code in range(32, 127)}
    return "".join(known[token] for token in ids)


async def test_values_have_the_types_of_the_offered_functions(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("<tool_call><function={{ messages | length }}>")
    text = (
        "Well.\n<tool_call>\n<function=find>\n<parameter=isbn>\n201\n</parameter>\n"
        "<parameter=pages>\n672\n</parameter>\n</function>\n</tool_call>"
    )
    engine = FakeTriton(tokens=ids_of(tmp_path, text), fault=None, step=0)
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}], "tools": TOOLS}
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, max_seq_len=512) as (client, _, _),
    ):
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        stream = await client.post("/v1/chat/completions", json=body | {"stream": True})
    [choice] = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Well.")
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "find", "arguments": '{"isbn": "201", "pages": 672}'}
    frames = [line.removeprefix("data: ") for line in stream.text.splitlines() if line]
    deltas = [c["delta"] for f in frames[:-1] for c in json.loads(f)["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    pieces = [call["function"]["arguments"] for call in calls]
    assert "".join(pieces) == '{"isbn": "201", "pages": 672}'


@pytest.mark.parametrize("stream", [True, False])
async def test_what_matches_a_format_is_no_call(tmp_path: Path, stream: bool) -> None:
    """An answer in the requested format stays text, even if the model's tool calls look like it."""
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        'Use {"name": function name, "parameters": {}}. {{ messages | length }}'
    )
    text = '{"name": "Ada", "parameters": {"age": 36}}'
    engine = FakeTriton(tokens=ids_of(tmp_path, text), fault=None, step=0)
    wanted = {"response_format": {"type": "json_object"}, "tools": TOOLS, "stream": stream}
    body = {"model": "m", "messages": [{"role": "user", "content": "?"}]} | wanted
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, max_seq_len=512) as (client, _, _),
    ):
        answer = await client.post("/v1/chat/completions", json=body)
    assert answer.headers["x-ignored-parameters"] == "tools"
    if not stream:
        [choice] = answer.json()["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)
    assert "tool_calls" not in answer.text


ANSWERS = {
    "type": "object",
    "properties": {"title": {"type": "string"}},
    "required": ["title"],
    "additionalProperties": False,
}
IN_A_FORMAT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "?"}],
        "tools": TOOLS,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": ANSWERS}},
    },
    "/v1/responses": {
        "input": "?",
        "tools": [{"type": "function", **TOOLS[0]["function"]}],
        "text": {"format": {"type": "json_schema", "name": "n", "schema": ANSWERS}},
    },
    "/v1/messages": {
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "?"}],
        "tools": [{"name": "find", "input_schema": TOOLS[0]["function"]["parameters"]}],
        "output_config": {"format": {"type": "json_schema", "schema": ANSWERS}},
    },
}


def _found(path: str, answer: dict[str, Any]) -> tuple[list[Any], str | None]:
    """Return the arguments of an answer's calls, and the answer's text or None."""
    if path == "/v1/messages":
        blocks = answer["content"]
        texts = [block["text"] for block in blocks if block["type"] == "text"]
        calls = [block["input"] for block in blocks if block["type"] == "tool_use"]
    elif path == "/v1/responses":
        items = answer["output"]
        texts = [item["content"][0]["text"] for item in items if item["type"] == "message"]
        calls = [json.loads(i["arguments"]) for i in items if i["type"] == "function_call"]
    else:
        message = answer["choices"][0]["message"]
        texts = [message["content"]]
        calls = [json.loads(c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    return calls, next(iter(texts), None)


@pytest.mark.parametrize("path", IN_A_FORMAT)
async def test_tools_beside_a_format_are_called_or_it_is_kept(tmp_path: Path, path: str) -> None:
    """The guide allows the answer, a list of calls, or a single call.

    The name of the first member shows which one the model wrote.
    """
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("<tool_call><function={{ messages | length }}>")
    body = {"model": "m"} | IN_A_FORMAT[path]
    found = []
    for text in (
        '{"title": "Name, arguments"}',
        '{"name": "find", "arguments": {"isbn": "2"}}',
        ' {\n"name": "find", "parameters": {"isbn": "2"}}',
        '[{"name": "find", "arguments": {"isbn": "2"}}, {"name": "find", "arguments": {}}]',
    ):
        engine = FakeTriton(tokens=ids_of(tmp_path, text), fault=None, step=0)
        async with (
            serving(engine) as endpoint,
            running(tmp_path, endpoint, max_seq_len=512) as (client, _, _),
        ):
            answer = await client.post(path, json=body)
        assert "x-ignored-parameters" not in answer.headers, answer.text
        found.append(_found(path, answer.json()))
        [request] = engine.requests
        names = [tensor.name for tensor in request.inputs]
        assert "guided_decoding_guide" in names
    assert found == [
        ([], '{"title": "Name, arguments"}'),
        ([{"isbn": "2"}], None),
        ([{"isbn": "2"}], None),
        ([{"isbn": "2"}, {}], None),
    ]


async def test_kimi_is_shown_ids_of_its_own(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for c in m.tool_calls or () %}<|tool_calls_section_begin|>"
        "{{ c.id }}{% endfor %}{% if m.tool_call_id %}Return of {{ m.tool_call_id }}{% endif %}"
        "{% endfor %}"
    )
    engine = FakeTriton(tokens=ids_of(tmp_path, "Yes."), fault=None, step=0)
    call = {"type": "function", "function": {"name": "find", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [call | {"id": "x"}, call | {"id": "y"}]},
        {"role": "tool", "tool_call_id": "y", "content": "1"},
    ]
    body = {"model": "m", "messages": messages, "tools": TOOLS}
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, max_seq_len=512) as (client, _, _),
    ):
        answer = await client.post("/v1/chat/completions", json=body)
        said = await client.post("/tokenize", json={"messages": messages})
    assert answer.json()["choices"][0]["message"]["content"] == "Yes."
    opening = "<|tool_calls_section_begin|>"
    assert _prompt(tmp_path, engine.requests[0]) == (
        f"{opening}functions.find:0{opening}functions.find:1Return of functions.find:1"
    )
    assert said.json()["count"] == len(_prompt(tmp_path, engine.requests[0]))


# Loops over a call's arguments, from the templates of Qwen3-Coder, GLM-4.5 and MiniMax-M2.
BY_PARAMETERS = {
    "qwen3_coder": "<tool_call><function=f>{% for k, v in a | items %}{{ k }}={{ v }};{% endfor %}",
    "glm45": "<tool_call>f{% for k, v in a.items() %}<arg_key>{{ k }}={{ v }};{% endfor %}",
    "minimax_m2": "<minimax:tool_call>{% for k, v in a.items() %}{{ k }}={{ v }};{% endfor %}",
}


@pytest.mark.parametrize("form", BY_PARAMETERS)
async def test_a_call_that_was_cut_goes_back_by_its_parameters(tmp_path: Path, form: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% for c in m.tool_calls or () %}{% set a = c.function.arguments %}"
        f"{BY_PARAMETERS[form]}{{% endfor %}}{{% endfor %}}"
    )
    engine = FakeTriton(tokens=ids_of(tmp_path, "Yes."), fault=None, step=0)
    written = {
        '{"isbn": "201", "pages": 6}': "isbn=201;pages=6;",
        '{"isbn": "201", "pages": 6': "isbn=201;pages=6;",
        '{"isbn": "201", "pa': "isbn=201;",
        "{'isbn': 201}": "",
        "[1]": "",
        "null": "",
        "": "",
    }
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, max_seq_len=512) as (client, _, _),
    ):
        for arguments, parameters in written.items():
            call = {"id": "x", "function": {"name": "find", "arguments": arguments}}
            messages = [
                {"role": "user", "content": "?"},
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "x", "content": "That is no JSON."},
            ]
            answer = await client.post(
                "/v1/chat/completions", json={"model": "m", "messages": messages}
            )
            assert answer.status_code == 200, answer.text
            prompt = _prompt(tmp_path, engine.requests[-1])
            assert "".join(re.findall(r"\w+=\w+;", prompt)) == parameters
        # JSON in arguments has the same limit on objects and arrays as the body.
        call["function"] = {"name": "find", "arguments": '{"x": [' + "[]," * 250_000}
        answer = await client.post(
            "/v1/chat/completions", json={"model": "m", "messages": messages}
        )
    assert answer.status_code == 400
    assert "objects and arrays; allowed: 200000" in answer.json()["error"]["message"]


@pytest.mark.parametrize("form", ["<｜tool▁calls▁begin｜> ```json", '<tool_call> "arguments"'])
async def test_a_message_that_ends_with_calls_is_not_continued(tmp_path: Path, form: str) -> None:
    """A continued message would lose its calls. DeepSeek's first templates also get no content."""
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        f"{{# {form} #}}{{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
    )
    engine = FakeTriton(tokens=ids_of(tmp_path, "Yes."), fault=None, step=0)
    call = {"id": "x", "function": {"name": "find", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    body = {"model": "m", "messages": messages, "continue_final_message": True}
    async with (
        serving(engine) as endpoint,
        running(tmp_path, endpoint, max_seq_len=512) as (client, _, _),
    ):
        for path, more in (
            ("/v1/chat/completions", {}),
            ("/tokenize", {"add_generation_prompt": False}),
        ):
            answer = await client.post(path, json=body | more)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert error["param"] == "continue_final_message"
            assert error["message"].startswith("continue_final_message: ")
