"""Tools combined with a response format: the guide, and parsing of answers and calls."""

from __future__ import annotations

import json
from typing import Any, get_args

import jsonschema
import pytest

from gateway.parsers.tools.either import Either, either_schema
from guides.kinds import Backend
from guides.worker import Checker
from tests.support.tool_calls import calls_of, content_of, parse_pieces

TITLE: dict[str, Any] = {
    "type": "object",
    "properties": {"title": {"$ref": "#/$defs/Text"}},
    "required": ["title"],
    "$defs": {"Text": {"type": "string"}},
}
COUNT = {"type": "object", "properties": {"n": {"$ref": "#/definitions/N"}}, "required": ["n"]} | {
    "definitions": {"N": {"type": "integer"}}
}
NAMED = {"type": "object", "properties": {"name": {"type": "string"}}}
ARGUED = {"type": "object", "properties": {"n": {}, "arguments": {}}, "required": ["n"]}
CALL = '{"name": "f", "arguments": {"a": [1]}}'
STRICT = '{"name": "g", "arguments": {"n": 1}}'


@pytest.mark.parametrize(
    ("schema", "either"),
    [
        (TITLE, Either(may_have_name=False)),
        (TITLE | {"additionalProperties": False}, Either(may_have_name=False)),
        (NAMED, Either(may_have_name=True)),
        (TITLE | {"required": ["title", "name"]}, Either(may_have_name=True)),
        (ARGUED, None),
        (TITLE | {"required": ["title", "parameters"]}, None),
        (TITLE | {"additionalProperties": True}, None),
        (TITLE | {"additionalProperties": {}}, None),
        (TITLE | {"patternProperties": {"^n": {}}}, None),
        (TITLE | {"dependentRequired": {"title": ["arguments"]}}, None),
        (TITLE | {"anyOf": [NAMED]}, None),
        ({"type": "object"}, None),
        ({"$ref": "#/$defs/A", "$defs": {"A": NAMED}}, None),
        ({"type": ["object", "array"]}, None),
        # Invalid schemas: the guide's compiler reports the error.
        (TITLE | {"required": None}, None),
        (TITLE | {"required": [["a"]]}, Either(may_have_name=False)),
        (TITLE | {"properties": 5}, None),
        (None, None),
    ],
)
def test_calls_are_allowed_where_no_answer_looks_like_one(schema: Any, either: Any) -> None:
    assert Either.beside(schema) == either


def _guide(schema: dict[str, Any], *, parallel: bool = True) -> str:
    return either_schema(schema, {"f": None, "g": COUNT}, ["g"], parallel=parallel)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        (CALL, True),
        (CALL.replace("arguments", "parameters"), True),
        (STRICT, True),
        (f"[{CALL}]", True),
        (f"[{STRICT}, {CALL}]", True),
        (STRICT.replace("1", '"1"'), False),
        (CALL.replace('"f"', '"h"'), False),
        ("[]", False),
    ],
)
def test_the_guide_allows_calls(text: str, allowed: bool) -> None:
    guide = json.loads(_guide(TITLE | {"additionalProperties": False}))
    assert jsonschema.Draft202012Validator(guide).is_valid(json.loads(text)) is allowed


def test_the_guide_allows_answers_and_as_many_calls_as_are_wanted() -> None:
    guide = json.loads(_guide(COUNT, parallel=False))
    validator = jsonschema.Draft202012Validator(guide)
    one = json.loads(CALL)
    found = [validator.is_valid(text) for text in ({"n": 1}, {"n": "1"}, {}, [one], [one, one])]
    assert found == [True, False, False, True, False]


@pytest.mark.parametrize("schema", [TITLE, NAMED])
def test_engines_take_the_guide(schema: dict[str, Any]) -> None:
    for backend in get_args(Backend):
        assert Checker().verdict("json_schema", _guide(schema), backend).refusal is None


def test_a_schema_that_refers_elsewhere_is_refused_by_name() -> None:
    other = TITLE | {"properties": {"title": {"$ref": "other.json"}}}
    refusal = Checker().verdict("json_schema", _guide(other), "xgrammar").refusal
    assert refusal is not None
    assert refusal.startswith("$.$defs.answer.properties.title: $ref: other.json cannot be")


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (CALL, [("f", '{"a": [1]}')], ""),
        ('\n {"name":"f","parameters":{}}', [("f", "{}")], ""),
        (f"[{CALL},\n{STRICT}]", [("f", '{"a": [1]}'), ("g", '{"n": 1}')], ""),
        ('{"title": "name"}', [], '{"title": "name"}'),
        ("{}", [], "{}"),
        ('{"name": "f", "argu', [], ""),
        ('{"name": "f", "arguments": {"a"', [("f", '{"a"')], ""),
        ('{"name": "get_wea', [], ""),
        ('{"na', [], '{"na'),
        # `id` and `type` occur in some tool call formats, but in an answer they are ordinary
        # properties.
        ('{"id": "a", "type": "b', [], '{"id": "a", "type": "b'),
        (f'[{CALL}, {{"name": "g', [("f", '{"a": [1]}')], ""),
    ],
)
def test_what_came_is_told_by_how_it_begins(
    text: str, calls: list[tuple[str, str]], content: str
) -> None:
    events = parse_pieces(Either(may_have_name=False).parser, *text)
    assert (calls_of(events), content_of(events)) == (calls, content)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (CALL, [("f", '{"a": [1]}')], ""),
        ('{"name": "f", "age": 3}', [], '{"name": "f", "age": 3}'),
        ('{"name": "f"}', [], '{"name": "f"}'),
        # Cut text may still be an answer.
        ('{"name": "f", "a', [], '{"name": "f", "a'),
        (f'[{CALL}, {{"name": "g", "a', [("f", '{"a": [1]}')], ""),
    ],
)
def test_an_answer_may_have_a_name_too(
    text: str, calls: list[tuple[str, str]], content: str
) -> None:
    events = parse_pieces(Either(may_have_name=True).parser, *text)
    assert (calls_of(events), content_of(events)) == (calls, content)


def test_many_tools_fit() -> None:
    """The guide refers to repeated schemas by `$ref`, so that it stays below the size limit."""
    place = {"type": "object", "properties": {name: {"type": "string"} for name in "abc"}}
    many = {f"f{n}": place for n in range(150)}
    guide = either_schema(TITLE, many, list(many), parallel=True)
    for backend in get_args(Backend):
        assert Checker().verdict("json_schema", guide, backend).refusal is None


def test_an_answer_comes_while_it_is_written() -> None:
    """The parser holds the answer back only until it has read the first property name."""
    parser = Either(may_have_name=False).parser()
    assert parser.parse('{"tit') == []
    [event] = parser.parse('le": "a')
    assert content_of([event]) == '{"title": "a'
