"""Refusals of bodies: the parameter, the value found, and what is allowed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from gateway.api.anthropic import requests as messages
from gateway.api.anthropic.requests import MessagesRequest
from gateway.api.openai.parameters import Parsed, parse
from gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.api.responses import chats
from gateway.api.responses.conversations import AddedItems, NewConversation
from gateway.api.responses.requests import ResponseRequest
from gateway.api.tokens import DetokenizeRequest, TokenizeRequest
from gateway.api.vectors.embeddings import EmbeddingsRequest
from gateway.api.vectors.rerank import RerankRequest
from gateway.errors import InvalidRequest, UnsupportedParameter

MESSAGES = [{"role": "user", "content": "Hi"}]
NEEDED: dict[type[BaseModel], dict[str, Any]] = {
    ChatCompletionRequest: {"messages": MESSAGES},
    CompletionRequest: {"prompt": "Hi"},
    ResponseRequest: {"input": "Hi"},
    MessagesRequest: {"messages": MESSAGES, "max_tokens": 5},
}
OTHERS: list[type[BaseModel]] = [
    *(NewConversation, AddedItems, EmbeddingsRequest, RerankRequest),
    *(TokenizeRequest, DetokenizeRequest),
]
SCHEMA = {"type": "object"}
RESULT = {"type": "tool_result", "tool_use_id": "t"}


def read(model: type[Any], fields: dict[str, Any], *, refuse_unknown: bool = False) -> Parsed[Any]:
    body = json.dumps({"model": "m"} | NEEDED[model] | fields).encode()
    if model is ResponseRequest:
        return chats.parse(model, body, refuse_unknown=refuse_unknown)
    if model is MessagesRequest:
        return messages.parse(model, body, refuse_unknown=refuse_unknown)
    return parse(model, body, refuse_unknown=refuse_unknown)


def refusal(model: type[Any], fields: dict[str, Any]) -> str:
    with pytest.raises(InvalidRequest) as refused:
        read(model, fields)
    return refused.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, "temperature: Input should be a number; found 'hot'."),
        ({"stream": None, "n": 0}, "n: Input should be greater than or equal to 1; found 0."),
        (
            {"tool_choice": "always"},
            "tool_choice: Input should be 'none', 'auto' or 'required' or an object; "
            "found 'always'.",
        ),
        (
            {"tool_choice": {"type": "fun"}},
            "tool_choice: Input should be of type function, custom or allowed_tools; found 'fun'.",
        ),
        (
            {"tools": [{"type": "function", "a, b": 1, "c\nd": 2}]},
            "tools[0].function: Field required; found type, a\\u002c\\u0020b, c\\u000ad.",
        ),
        ({"messages": "Hi"}, "messages: Input should be an array; found 'Hi'."),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type: Input should be 'text', 'refusal', 'input_text' or "
            "'output_text'; found 'image_url'. Only text is accepted.",
        ),
        ({"tools": ["f"]}, "tools[0]: Input should be an object; found 'f'."),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": SCHEMA}]},
            "tools[0].function: Field required; found type, name, parameters.",
        ),
        (
            {"tools": [{"type": "functon", "function": {"name": "f"}}]},
            "tools[0]: Input should be of type function or custom; found 'functon'.",
        ),
        (
            {"modalities": ["audio"]},
            'modalities is not supported by this server; leave it out or send ["text"].',
        ),
        ({"stop_regex": ["a"]}, "stop_regex is not supported by this server; leave it out."),
        (
            {"top_n_sigma": 2},
            "top_n_sigma is not supported by this server; leave it out or send -1 or 0.",
        ),
        (
            {"functions": [{"name": "f"}]},
            "functions is not a parameter of this endpoint; send tools instead.",
        ),
    ],
)
def test_a_chats_refusal_says_what_was_found_and_what_is_allowed(
    fields: dict[str, Any], message: str
) -> None:
    assert refusal(ChatCompletionRequest, fields) == message


def test_an_unknown_tool_is_refused_with_the_names_of_known_ones() -> None:
    tools = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(9)]
    choice = {"type": "function", "function": {"name": "g"}}
    several = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [choice]}}
    known = "'g', not the name of a tool; allowed: f0, f1, f2, f3, f4, f5, f6, f7, ..."
    assert known in refusal(ChatCompletionRequest, {"tools": tools, "tool_choice": several})
    wanted = read(ChatCompletionRequest, {"tools": tools, "tool_choice": choice}).request
    with pytest.raises(InvalidRequest) as refused:
        wanted.build_guide()
    assert known in refused.value.message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mcp_servers": [{}]}, "mcp_servers: not supported by this server; leave it out."),
        ({"container": "c"}, "container: not supported by this server; leave it out."),
        ({"tool_choice": "auto"}, "tool_choice: Input should be an object; found 'auto'."),
        (
            {"tools": [{"name": "f", "description": "d"}]},
            "tools.0.input_schema: Field required; found name, description.",
        ),
        ({"system": 5}, "system: Input should be a string or an array; found 5."),
        (
            {"messages": [{"role": "user", "content": [{"type": "tekst", "text": "a"}]}]},
            "messages.0.content.0.type: Input should be 'text', 'thinking', 'redacted_thinking', "
            "'tool_use' or 'tool_result'; found 'tekst'.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
            "messages.0.content.0.type: Field required; found text.",
        ),
        (
            {"messages": [{"role": "user", "content": [RESULT | {"content": [{"type": ["x"]}]}]}]},
            "messages.0.content.0.content.0.type: Input should be 'text' or 'tool_reference'; "
            "found an array.",
        ),
        (
            {"system": [{"type": "x" * 9999}]},
            "system.0.type: Input should be 'text'; found '" + "x" * 63 + "....",
        ),
    ],
)
def test_a_refusal_of_messages_says_it_too(fields: dict[str, Any], message: str) -> None:
    assert refusal(MessagesRequest, fields) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": [5]}, "input[0]: Input should be an object; found 5."),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].name: Field"),
        ({"max_output_tokens": 2**64}, "max_output_tokens: Input should be an integer from -"),
        ({"max_tool_calls": 1e308}, "max_tool_calls: Input should be an integer from -"),
        (
            {"input": None},
            "You must provide the parameter input. Send a text, or an array of items.",
        ),
        ({"input": []}, "input: found []. Send a text, or an array of items."),
        ({"truncation": "x"}, "truncation: Input should be 'auto' or 'disabled'; found 'x'."),
    ],
)
def test_a_refusal_of_responses_says_it_too(fields: dict[str, Any], message: str) -> None:
    assert refusal(ResponseRequest, fields).startswith(message)


@pytest.mark.parametrize(
    ("model", "fields", "param", "kind"),
    [
        (
            ChatCompletionRequest,
            {"tools": [{"type": "function"}]},
            "tools[0].function",
            InvalidRequest,
        ),
        (ChatCompletionRequest, {"stop": ["a", 5]}, "stop[1]", InvalidRequest),
        (
            ChatCompletionRequest,
            {"messages": [{"role": "user", "content": "", "audio": {}}]},
            "messages[0].audio",
            UnsupportedParameter,
        ),
        (
            ChatCompletionRequest,
            {"reasoning": {"exclude": True}},
            "reasoning.exclude",
            UnsupportedParameter,
        ),
        (ChatCompletionRequest, {"stopping_strings": [5]}, "stopping_strings", InvalidRequest),
        (CompletionRequest, {"prompt": ["a", 5]}, "prompt[1]", InvalidRequest),
        (ResponseRequest, {"prompt": {"id": "p"}}, "prompt", UnsupportedParameter),
        (
            ResponseRequest,
            {"input": [{"type": "message", "role": "user", "content": 5}]},
            "input[0].content",
            InvalidRequest,
        ),
        (MessagesRequest, {"mcp_servers": [{}]}, "mcp_servers", UnsupportedParameter),
        (MessagesRequest, {"container": "c"}, "container", UnsupportedParameter),
        (
            MessagesRequest,
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text",
            InvalidRequest,
        ),
    ],
)
def test_a_refusals_parameter_is_the_whole_path(
    model: type[Any], fields: dict[str, Any], param: str, kind: type[InvalidRequest]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(model, fields)
    assert type(refused.value) is kind
    assert refused.value.param == param
    assert refused.value.message.startswith(param)


def test_all_unknown_names_are_refused_at_once() -> None:
    for model in NEEDED:
        with pytest.raises(InvalidRequest, match=r"arguments: temprature, x\.") as refused:
            read(model, {"temprature": 1, "x": 2}, refuse_unknown=True)
        assert refused.value.param == "temprature"
        assert "Did you mean temperature?" in refused.value.message


def lists_of(schema: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the path and the schema of each list within a pydantic core schema."""
    if isinstance(schema, dict):
        if schema.get("type") == "list" and schema.get("items_schema"):
            yield path, schema
        for name, value in schema.items():
            yield from lists_of(value, f"{path}.{name}")
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from lists_of(value, path)


@pytest.mark.parametrize("model", [*NEEDED, *OTHERS])
def test_a_list_of_wrong_items_is_refused_at_the_first(model: type[BaseModel]) -> None:
    """A million errors for a million wrong items would block the event loop for seconds."""
    model.model_rebuild()
    for path, schema in lists_of(model.__pydantic_core_schema__, model.__name__):
        items = schema["items_schema"]["type"]
        assert schema.get("fail_fast") or schema.get("max_length", 1e9) <= 128 or items == "any", (
            path
        )


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)


@given(st.data())
def test_any_value_of_any_parameter_is_taken_or_refused_in_few_words(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from([*NEEDED]))
    name = data.draw(st.sampled_from([*model.model_fields]))
    message = ""
    try:
        read(model, {name: data.draw(values)})
    except InvalidRequest as error:
        message = error.message
    assert len(message) < 600
