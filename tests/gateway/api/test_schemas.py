"""Parsing and validation of each request parameter."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParameters
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParameters
from pydantic import BaseModel

from gateway.api.field_types import MAX_IDS
from gateway.api.openai import messages, schemas
from gateway.api.openai.generation_request import GenerationRequest
from gateway.api.openai.parameter_table import HARMLESS, HINTS, NOT_SERVED
from gateway.api.openai.parameters import parse
from gateway.api.openai.renamed_parameters import RENAMED
from gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.generation.options import MAX_CHOICES
from gateway.parsers.tools.ids import TemplateIds
from gateway.tokenization.chat_format import compile_template

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, json.dumps(CHAT | fields).encode()).request


def test_defaults_are_openais() -> None:
    options = chat().build_options()
    sampling = options.params
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert not sampling.greedy
    assert chat().output_limit is None
    assert chat().build_options().seed != options.seed


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"top_p": 0}, {"top_k": 1}])
def test_what_is_greedy(fields: dict[str, Any]) -> None:
    assert chat(**fields).build_options().params.greedy


def test_max_completion_tokens_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).output_limit == 7
    assert chat(max_tokens=5).output_limit == 5


@pytest.mark.parametrize(
    "text", ["x" * 65_537, "\u00e9" * 32_769, f"<think>{'x' * 65_536}</think>"]
)
def test_an_echo_is_kept_and_so_is_bounded(text: str) -> None:
    """The echo has its own limit, because a template may leave its text out of the prompt."""
    said = {"role": "assistant", "content": text}
    with pytest.raises(InvalidRequest, match="echo: found") as refused:
        chat(messages=[said], echo=True)
    assert refused.value.param == "echo"
    assert chat(messages=[said]).echo_text == ""
    half = text[: len(text) // 2]
    assert chat(messages=[said | {"content": half}], echo=True).echo_text == half


def test_schemas_are_kept_and_so_are_bounded_where_the_prompt_is_cut() -> None:
    def fields(size: int) -> dict[str, Any]:
        functions = [{"name": name, "parameters": {"a": "x" * (size // 2 - 8)}} for name in "fg"]
        return {"tools": [{"type": "function", "function": one} for one in functions]}

    most = 64 * 1024
    chat(**fields(most), truncate_prompt_tokens=1)
    chat(**fields(most + 2))
    with pytest.raises(InvalidRequest, match=f"tools: found {most + 2} bytes") as refused:
        chat(**fields(most + 2), truncate_prompt_tokens=1)
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("stop", "meant"),
    [(None, ()), ("", ()), ([], ()), ("a", ("a",)), (["a", " "], ("a", " "))],
)
def test_stop_strings(stop: Any, meant: tuple[str, ...]) -> None:
    assert chat(stop=stop).build_options().params.stop == meant


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_harmless_parameters_are_accepted(name: str) -> None:
    chat(**{name: {"any": "thing"}})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(ChatParameters, ChatCompletionRequest), (TextParameters, CompletionRequest)],
)
def test_no_parameter_of_openais_package_is_unheard_of(theirs: type, ours: type[BaseModel]) -> None:
    known = {*ours.model_fields, *HARMLESS, *HINTS, *NOT_SERVED, *RENAMED}
    assert set(theirs.__annotations__) - known == set()


@pytest.mark.parametrize("name", sorted(NOT_SERVED.keys() - ChatCompletionRequest.model_fields))
def test_parameters_that_are_not_served_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        chat(**{name: {"asks": "for something"}})
    assert caught.value.param == name
    assert name in caught.value.message
    for neutral in NOT_SERVED[name]:
        chat(**{name: neutral})
    chat(**{name: None})


@pytest.mark.parametrize(("name", "value"), [("min_p", False), ("modalities", "text")])
def test_a_look_alike_of_a_neutral_value_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedParameter):
        chat(**{name: value})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 1}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["", "a"]}, "stop[0]"),
        ({"bad_words": ["a", ""]}, "bad_words[1]"),
        ({"bad_words": ["a", *["b" * 1024] * 4]}, "bad_words"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_usage": "yes"}},
            "stream_options.include_usage",
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].type",
        ),
        ({"model": None}, "model"),
    ],
)
def test_bad_values_name_the_parameter(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        (["a", ""], "stop[1]: String should have at least 1 character, not 0."),
        (1, "stop: Input should be a string or an array; found 1."),
        ({}, "stop: Input should be a string or an array; found an object."),
        ("a" * 1025, "stop: String should have at most 1024 characters, not 1025."),
        (["a"] * 17, "stop: List should have at most 16 items, not 17."),
    ],
)
def test_wrong_stop_strings_in_words(stop: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(stop=stop)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([0] * (MAX_IDS + 1), f"prompt: List should have at most {MAX_IDS} items"),
        ([[0]] * (MAX_CHOICES + 1), f"prompt: List should have at most {MAX_CHOICES} items"),
        (["a"] * (MAX_CHOICES + 1), f"prompt: List should have at most {MAX_CHOICES} items"),
        ([[0] * (MAX_IDS + 1)], f"prompt[0]: List should have at most {MAX_IDS} items"),
        ([0, -1], "prompt[1]: Input should be greater than or equal to 0; found -1."),
        ([0, 2**31], "prompt[1]: Input should be less than 2147483648; found 2147483648."),
        (["a", 0], "prompt[1]: Input should be a string; found 0."),
        ([0, "a"], "prompt[1]: Input should be an integer; found 'a'."),
        (["a", None], "prompt[1]: Input should be a string; found null."),
        ([], "prompt: List should have at least 1 item"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_prompts_in_words(prompt: Any, message: str) -> None:
    body = json.dumps({"model": "m", "prompt": prompt}).encode()
    with pytest.raises(InvalidRequest) as caught:
        parse(CompletionRequest, body)
    assert caught.value.param == message.partition(":")[0]
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'{"a": NaN}', b'"\xff"', b"\xff"])
def test_bodies_that_are_no_json_object(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse(ChatCompletionRequest, body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=10,
)
names = st.sampled_from(
    [*GenerationRequest.model_fields, "messages", "prompt", *NOT_SERVED, *RENAMED, *HINTS]
)


@given(st.dictionaries(names | st.text(max_size=10), json_values, max_size=6))
def test_wild_bodies_are_parsed_or_refused_with_a_reason(body: dict[str, Any]) -> None:
    for model in (ChatCompletionRequest, CompletionRequest):
        with suppress(InvalidRequest):  # anything else would be a 500
            parse(model, json.dumps(body).encode())


def test_the_part_that_is_not_text_is_named() -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=[{"role": "user", "content": parts}])
    assert caught.value.message.startswith("messages[0].content[1].type: ")
    assert "Only text is accepted" in caught.value.message


def test_malformed_arguments_go_to_the_template_as_they_are() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    [message] = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    assert (
        message.to_template(TemplateIds(None))["tool_calls"][0]["function"]["arguments"] == '{"x": '
    )


@pytest.mark.parametrize("arguments", [None, "", "null", " null "])
def test_no_arguments_are_an_empty_object_to_templates(arguments: str | None) -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": arguments}}
    [message] = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    [told] = message.to_template(TemplateIds(None))["tool_calls"]
    assert told["function"]["arguments"] == {}


def test_arguments_are_an_object_to_templates_and_json_where_they_are_added_to_text() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"x": ["é", true]}'}}
    [message] = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages
    template = compile_template(
        "{% set a = m.tool_calls[0].function.arguments %}"
        "{{ 'A' + a + 'B' }} {{ a }} {{ a | tojson }}"
        "{% for key, value in a.items() %} {{ key }} {{ value | length }}{% endfor %}"
        "{{ a is mapping }}{{ a is string }}"
    )
    said = '{"x": ["é", true]}'
    assert template.render(m=message.to_template(TemplateIds(None))) == (
        f"A{said}B {said} {said} x 2TrueFalse"
    )


def test_deepseeks_first_templates_are_told_that_there_is_no_content() -> None:
    call = {"id": "c1", "function": {"name": "f", "arguments": "{}"}}
    said = [
        {"role": "assistant", "content": content, "tool_calls": [call]} for content in (None, "So")
    ]
    [silent, spoken] = chat(messages=said).messages
    ids = TemplateIds("deepseek_v3")
    assert silent.to_template(ids)["content"] is None
    assert spoken.to_template(ids)["content"] == "So"
    # Templates of other models would write the word None.
    assert silent.to_template(TemplateIds("glm45"))["content"] == ""


def test_messages_for_the_template() -> None:
    request = chat(
        messages=[
            {
                "role": "developer",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"x": 1}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ]
    )
    developer, assistant, tool = [m.to_template(TemplateIds(None)) for m in request.messages]
    assert developer == {"role": "system", "content": "ab"}
    assert assistant["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "c1"}


_WRONG: list[Any] = [
    1,
    "x",
    [1],
    ["x"],
    {"a": 1},
    {"type": "json_schema", "json_schema": 1},
    {"type": "function", "function": 1},
    [{"type": "function", "function": 1}],
    [{"role": "user", "content": {"a": 1}}],
    [{"role": "user", "content": [1]}],
    [{"role": "assistant", "tool_calls": [1]}],
]


@pytest.mark.parametrize("wrong", _WRONG, ids=repr)
def test_no_message_names_a_class_of_ours(wrong: object) -> None:
    ours = {
        name
        for module in (messages, schemas)
        for name, found in vars(module).items()
        if isinstance(found, type) and issubclass(found, BaseModel)
    }
    told = []
    for name in ChatCompletionRequest.model_fields:
        try:
            chat(**{name: wrong})
        except InvalidRequest as error:
            told.append(error.message)
    assert len(told) > 10
    assert [message for message in told if ours.intersection(re.findall(r"\w+", message))] == []
