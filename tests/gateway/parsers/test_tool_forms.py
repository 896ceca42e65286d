"""Tool call formats: detection from chat templates, call ids, and guides of forced tool choices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import InvalidRequest
from gateway.parsers.tools.forced import arguments_guide, calls_guide
from gateway.parsers.tools.forms import PARSERS, Form, guess
from gateway.parsers.tools.ids import TemplateIds, new_id


@pytest.mark.parametrize(
    ("fragment", "form"),
    [
        # Qwen2.5 and Qwen3
        (
            '{{- \'\\n<tool_call>\\n{"name": "\' }}{{- tool_call.name }}'
            '{{- \'", "arguments": \' }}{{- tool_call.arguments | tojson }}'
            "{{- '}\\n</tool_call>' }}",
            "hermes",
        ),
        # Hermes 2 Pro and 3
        (
            '{{- \'{"name": <function-name>, "arguments": <args-dict>}\n\' }}'
            "{{- '</tool_call><|im_end|>' }}{{- '\\n<tool_call>\\n' }}",
            "hermes",
        ),
        # Llama 3.1, 3.2 and 3.3
        (
            '{{- \'Respond in the format {"name": function name, "parameters": dictionary of'
            ' argument name and its value}.\' }}{{- "<|python_tag|>" }}',
            "llama3_json",
        ),
        # Mistral 7B v0.3, Mistral Small 3.1, Devstral
        ('{{- "[TOOL_CALLS] [" }}{{- \', "id": "\' + tool_call.id + \'"}\' }}', "mistral"),
        ("{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}", "mistral"),
        # Llama 3.2 and 4 pythonic, ToolACE
        (
            "- Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
            "pythonic",
        ),
        (
            "you MUST put it in the format of [func_name1(params_name1=params_value1,"
            " params_name2=params_value2...), func_name2(params)]",
            "pythonic",
        ),
        # Llama 4, as published
        (
            '{{- \'Respond in the format {"name": function name, "parameters": dictionary of\' }}'
            "{{- '<|python_start|>' }}{{- message['content'] }}{{- '<|python_end|>' }}",
            "llama3_json",
        ),
        # Llama 4 in vLLM's examples
        (
            "{{- 'Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]'"
            " }}<|python_start|>",
            "pythonic",
        ),
        # Granite 4
        (
            '{{- \'<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\' }}',
            "hermes",
        ),
        # Granite 3
        (
            "respond only with <|tool_call|> followed by a JSON list of tools used. "
            '"arguments" <|tool_response|>',
            "granite",
        ),
        # Phi-4-mini: the published template, one with calls, and that of vLLM
        (
            "{{ '<|' + message['role'] + '|>' + '<|tool|>' + tools + '<|/tool|>' }}",
            "phi4_mini_json",
        ),
        (
            "{{- '<|tool|>' + (tool | tojson) }}{{- '<|tool_call|>{\"arguments\": {}}' }}",
            "phi4_mini_json",
        ),
        (
            'JSON list formatted as functools[{"name": [function name], "arguments"',
            "phi4_mini_json",
        ),
        # Qwen3-Coder, GLM-4.5: the tags of Hermes around another format
        ("{{- '<tool_call>\\n<function=' + name + '>' }} \"arguments\"", "qwen3_coder"),
        ("{{ '<tool_call>' + name }}<arg_key>{{ k }}</arg_key> \"arguments\"", "glm45"),
        # DeepSeek-V3 and R1, V3.1
        (
            "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '\\n' + '```json'}}",
            "deepseek_v3",
        ),
        (
            "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'+ tool['function']['name']}}",
            "deepseek_v31",
        ),
        # Kimi-K2
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ tool_call['id'] }}", "kimi_k2"),
        # MiniMax-M1 and M2
        ('<tool_calls>\\n{"name": <tool-name>, "arguments": <args-json-object>}\\n...', "minimax"),
        ("{%- set toolcall_begin_token = '<minimax:tool_call>' -%}", "minimax_m2"),
        # Formats without a parser: Seed-OSS, LFM2
        ("{{ '<seed:tool_call>\\n<function=' + name + '>' }}", None),
        ("{{ '<|tool_call_start|>[' + name + '(' }}", None),
        # Templates without tools: Phi-3, Zephyr, ChatML
        ("{{'<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n'}}", None),
        ("{{'<|im_start|>' + message['role'] + '\\n' + message['content']}}", None),
        ("", None),
    ],
)
def test_the_form_is_guessed_from_the_template(fragment: str, form: Form | None) -> None:
    assert guess("{% for message in messages %}" + fragment + "{% endfor %}") == form


def test_the_forms_have_names_for_settings() -> None:
    assert {*get_args(Form)} == {*PARSERS, "openai"}


@pytest.mark.parametrize("form", PARSERS)
def test_new_ids_fit_the_template(form: Form) -> None:
    ids = {new_id(form) for _ in range(200)}
    assert len(ids) == 200
    for call_id in ids:
        if form != "kimi_k2":
            assert TemplateIds(form).of_call(call_id, "f") == call_id
        assert call_id.removeprefix("call_").isalnum()
        assert len(call_id) == (9 if form == "mistral" else 29)


@given(st.lists(st.text(max_size=40), unique=True))
def test_any_id_becomes_one_that_mistral_takes(call_ids: list[str]) -> None:
    mistral, hermes = TemplateIds("mistral"), TemplateIds("hermes")
    mapped = [mistral.of_call(call_id, "f") for call_id in call_ids]
    assert all(len(m) == 9 and m.isascii() and m.isalnum() for m in mapped)
    assert len(set(mapped)) == len(call_ids)
    assert mapped == [mistral.of_answer(call_id) for call_id in call_ids]
    assert [hermes.of_call(call_id, "f") for call_id in call_ids] == call_ids


def test_kimis_ids_name_the_function_and_count_the_conversations_calls() -> None:
    ids = TemplateIds("kimi_k2")
    assert ids.of_call("call_a", "f") == "functions.f:0"
    assert ids.of_call("call_b", "g") == "functions.g:1"
    assert [ids.of_answer(call_id) for call_id in ("call_b", "call_a")] == [
        "functions.g:1",
        "functions.f:0",
    ]
    # Some clients start a new count in each assistant message.
    assert ids.of_call("call_a", "f") == "functions.f:2"
    assert ids.of_answer("call_a") == "functions.f:2"
    assert ids.of_answer("nobody's") == "nobody's"


# ---- Forced choices

UNIT = {"type": "string", "enum": ["C", "F"]}
WEATHER = {
    "type": "object",
    "properties": {
        "unit": {"$ref": "#/$defs/Unit"},
        "$ref": {"type": "string", "default": {"$ref": "kept"}},
    },
    "required": ["unit"],
    "$defs": {"Unit": UNIT},
    "$id": "https://example.org/weather",
}
TREE = {"type": "object", "properties": {"children": {"items": {"$ref": "#"}}}}


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key == "$ref" and isinstance(value, str):
                yield value
            elif key != "default":
                yield from _references(value)
    elif isinstance(schema, list):
        for item in schema:
            yield from _references(item)


def _resolve(document: Any, reference: str) -> Any:
    for part in reference.removeprefix("#/").split("/"):
        document = document[part]
    return document


def test_the_guide_of_a_required_choice_holds_every_function() -> None:
    guide = json.loads(calls_guide({"weather": WEATHER, "tree": TREE, "time": None}, parallel=True))
    assert (guide["type"], guide["minItems"]) == ("array", 1)
    assert guide["maxItems"] == 8
    found = {}
    for call in guide["items"]["anyOf"]:
        assert call["required"] == list(call["properties"]) == ["name", "arguments"]
        assert call["additionalProperties"] is False
        [name] = call["properties"]["name"]["enum"]
        found[name] = _resolve(guide, call["properties"]["arguments"]["$ref"])
    assert list(found) == ["weather", "tree", "time"]
    assert found["time"] == {"type": "object", "properties": {}, "additionalProperties": False}
    # References still lead to the same schemas.
    assert "$id" not in found["weather"]
    weather = found["weather"]["properties"]
    assert _resolve(guide, weather["unit"]["$ref"]) == UNIT
    assert weather["$ref"] == WEATHER["properties"]["$ref"]  # type: ignore[index]
    assert (
        _resolve(guide, found["tree"]["properties"]["children"]["items"]["$ref"]) == (found["tree"])
    )
    assert len(list(_references(guide))) == 5
    # The request's own schema is not modified.
    assert WEATHER["$id"]


def test_one_call_at_a_time() -> None:
    guide = json.loads(calls_guide({"f": None}, parallel=False))
    assert (guide["minItems"], guide["maxItems"]) == (1, 1)


@pytest.mark.parametrize(
    ("parameters", "guide"),
    [
        (None, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({}, {"type": "object", "additionalProperties": True}),
        ({"properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}}),
        (WEATHER, WEATHER),
        ({"$ref": "#/$defs/T", "$defs": {"T": TREE}}, {"$ref": "#/$defs/T", "$defs": {"T": TREE}}),
    ],
)
def test_the_guide_of_arguments_is_the_parameters(
    parameters: dict[str, Any] | None, guide: dict[str, Any]
) -> None:
    assert json.loads(arguments_guide(parameters)) == guide


def test_schemas_that_cannot_be_moved_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match="more than 100 levels") as refused:
        calls_guide({"f": deep}, parallel=True)
    assert refused.value.param == "tools"


def test_references_to_elsewhere_stay_for_the_compiler_to_refuse() -> None:
    for ref in ("other.json#/a", "#anchor"):
        guide = json.loads(calls_guide({"f": {"properties": {"a": {"$ref": ref}}}}, parallel=True))
        assert guide["$defs"]["arguments0"]["properties"]["a"] == {"$ref": ref}
