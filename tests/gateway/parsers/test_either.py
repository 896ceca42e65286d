"""Tools beside a format: what the guide allows, and how an answer is told from calls."""

from __future__ import annotations

import json
from typing import Any, get_args

import jsonschema
import pytest

from gateway.errors import InvalidRequest
from gateway.parsers.tools.either import Either
from guides.kinds import Backend
from guides.worker import Checker
from tests.support.tool_calls import calls_of, content_of, parsed

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
        (TITLE, Either(bare=True)),
        (TITLE | {"additionalProperties": False}, Either(bare=True)),
        (NAMED, Either(bare=True, named=True)),
        (TITLE | {"required": ["title", "name"]}, Either(bare=True, named=True)),
        (ARGUED, Either()),
        (TITLE | {"required": ["title", "parameters"]}, Either()),
        ({"type": "object"}, Either()),
        (TITLE | {"additionalProperties": True}, Either()),
        (TITLE | {"additionalProperties": {}}, Either()),
        (TITLE | {"patternProperties": {"^n": {}}}, Either()),
        (TITLE | {"dependentRequired": {"title": ["arguments"]}}, Either()),
        (TITLE | {"anyOf": [NAMED]}, Either()),
        ({"$ref": "#/$defs/A", "$defs": {"A": NAMED}}, None),
        ({"type": ["object", "array"]}, None),
        ({"type": "array"}, None),
        ({}, None),
        (None, None),
    ],
)
def test_calls_are_allowed_where_no_answer_looks_like_one(
    schema: dict[str, Any] | None, either: Either | None
) -> None:
    assert Either.beside(schema) == either


def _guide(schema: dict[str, Any], *, parallel: bool = True) -> str:
    either = Either.beside(schema)
    assert either is not None
    return either.guide(schema, {"f": None, "g": COUNT}, ["g"], parallel=parallel)


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (CALL, "bare"),
        (CALL.replace("arguments", "parameters"), "bare"),
        (STRICT, "bare"),
        (f"[{CALL}]", "both"),
        (f"[{STRICT}, {CALL}]", "both"),
        (STRICT.replace("1", '"1"'), "none"),
        (CALL.replace('"f"', '"h"'), "none"),
        ("[]", "none"),
    ],
)
def test_the_guide_allows_calls(text: str, where: str) -> None:
    for schema, places in ((TITLE, ("bare", "both")), (ARGUED, ("both",))):
        guide = json.loads(_guide(schema | {"additionalProperties": False}))
        validator = jsonschema.Draft202012Validator(guide)
        assert validator.is_valid(json.loads(text)) is (where in places), schema


def test_the_guide_allows_answers_and_as_many_calls_as_are_wanted() -> None:
    guide = json.loads(_guide(COUNT, parallel=False))
    validator = jsonschema.Draft202012Validator(guide)
    one = json.loads(CALL)
    found = [validator.is_valid(text) for text in ({"n": 1}, {"n": "1"}, {}, [one], [one, one])]
    assert found == [True, False, False, True, False]


@pytest.mark.parametrize("schema", [TITLE, NAMED, ARGUED, {"type": "object"}])
def test_engines_take_the_guide(schema: dict[str, Any]) -> None:
    for backend in get_args(Backend):
        assert Checker().verdict("json_schema", _guide(schema), backend).refusal is None


def test_a_schema_that_refers_elsewhere_is_refused_by_name() -> None:
    other = TITLE | {"properties": {"title": {"$ref": "other.json"}}}
    with pytest.raises(InvalidRequest, match=r"^response_format: .*other\.json") as caught:
        _guide(other)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (CALL, [("f", '{"a": [1]}')], ""),
        ('\n {"name":"f","parameters":{}}', [("f", "{}")], ""),
        (f"[{CALL},\n{STRICT}]", [("f", '{"a": [1]}'), ("g", '{"n": 1}')], ""),
        ('{"title": "name"}', [], '{"title": "name"}'),
        ("{}", [], "{}"),
        ('{"name": "f", "argu', [("f", "")], ""),
        ('{"name": "f", "arguments": {"a"', [("f", '{"a"')], ""),
        ('{"na', [], '{"na'),
        (f'[{CALL}, {{"name": "g', [("f", '{"a": [1]}')], ""),
    ],
)
def test_what_came_is_told_by_how_it_begins(
    text: str, calls: list[tuple[str, str]], content: str
) -> None:
    events = parsed(Either(bare=True).parser, *text)
    assert (calls_of(events), content_of(events)) == (calls, content)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (CALL, [("f", '{"a": [1]}')], ""),
        ('{"name": "f", "age": 3}', [], '{"name": "f", "age": 3}'),
        ('{"name": "f"}', [], '{"name": "f"}'),
        # Cut: it may be an answer.
        ('{"name": "f", "a', [], '{"name": "f", "a'),
        (f'[{CALL}, {{"name": "g", "a', [("f", '{"a": [1]}'), ("g", "")], ""),
    ],
)
def test_an_answer_may_have_a_name_too(
    text: str, calls: list[tuple[str, str]], content: str
) -> None:
    events = parsed(Either(bare=True, named=True).parser, *text)
    assert (calls_of(events), content_of(events)) == (calls, content)


def test_without_a_list_nothing_is_a_call_where_any_object_is_an_answer() -> None:
    events = parsed(Either().parser, CALL)
    assert (calls_of(events), content_of(events)) == ([], CALL)


def test_an_answer_comes_while_it_is_written() -> None:
    """It is held no longer than until its first name is known."""
    parser = Either(bare=True).parser()
    assert parser.parse('{"tit') == []
    [event] = parser.parse('le": "a')
    assert content_of([event]) == '{"title": "a'
