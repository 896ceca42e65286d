"""Best effort: unsupported keywords are dropped, and all others are enforced."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from guides.schema.enforcement import Enforcement
from guides.schema.reading import Reader
from guides.schema.rewrite import write
from guides.worker import Checker

DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
TEXT = {"type": "string"}
CLOSED = {"type": "object", "additionalProperties": False}


@pytest.fixture(scope="module")
def checker() -> Checker:
    return Checker()


def _relaxed(schema: Any) -> tuple[Any, tuple[str, ...]]:
    enforcement = Enforcement(["$"])
    return write(Reader(schema, "xgrammar", enforcement)), enforcement.left_out


@pytest.mark.parametrize(
    ("schema", "written", "left_out"),
    [
        (
            {"type": "array", "items": TEXT, "uniqueItems": True, "maxItems": 3},
            {"type": "array", "items": TEXT, "maxItems": 3},
            ["$.uniqueItems"],
        ),
        (
            {"properties": {"price": {"type": "number", "multipleOf": 0.01, "minimum": 0}}},
            {**CLOSED, "properties": {"price": {"type": "number", "minimum": 0}}},
            ["$.properties.price.multipleOf"],
        ),
        ({"type": "string", "not": {"not": {"minLength": 3}}}, TEXT, ["$.not"]),
        ({"type": "string", "pattern": DECIMAL}, TEXT, ["$.pattern"]),
        (
            {"type": "string", "pattern": "^a+b$", "maxLength": 3},
            {"type": "string", "pattern": "^a+b$"},
            ["$.maxLength"],
        ),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            {"anyOf": [{"type": "integer"}, {"type": "number"}]},
            ["$.oneOf"],
        ),
        (
            {"properties": {"a": {"$ref": "http://x/y"}, "b": {"$ref": "#anchor"}}},
            {**CLOSED, "properties": {"a": {}, "b": {}}},
            ["$.properties.a.$ref", "$.properties.b.$ref"],
        ),
        # A keyword that may allow more properties leaves the object open.
        (
            {"properties": {"a": TEXT}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
            {"type": "object", "properties": {"a": TEXT}, "additionalProperties": {}},
            ["$.if"],
        ),
        (
            {
                "properties": {"a": TEXT},
                "allOf": [{"if": True, "then": {"properties": {"b": {}}}}],
                "unevaluatedProperties": False,
            },
            {"type": "object", "properties": {"a": TEXT}, "additionalProperties": {}},
            ["$.allOf[0].if", "$.unevaluatedProperties"],
        ),
        (
            {"properties": {"a": TEXT}, "unevaluatedProperties": TEXT},
            {"type": "object", "properties": {"a": TEXT}, "additionalProperties": {}},
            ["$.unevaluatedProperties"],
        ),
        (
            {"patternProperties": {"(?=x)": TEXT}, "additionalProperties": False},
            {"type": "object", "additionalProperties": {}},
            ["$.patternProperties"],
        ),
        (
            {"type": "integer", "minimum": 2**63, "maximum": 1e300},
            {"type": "integer"},
            ["$.minimum"],
        ),
        (
            {"type": "object", "propertyNames": {"maxLength": 3}},
            {"type": "object", "additionalProperties": {}},
            ["$.propertyNames.maxLength"],
        ),
        ({"type": "string", "maxLength": 10**9}, TEXT, ["$.maxLength"]),
        (
            {"type": "array", "items": TEXT, "maxItems": 10**9},
            {"type": "array", "items": TEXT},
            ["$.maxItems"],
        ),
        (
            {"allOf": [{"type": "string", "pattern": "^a"}, {"pattern": "b$"}]},
            {"type": "string", "pattern": "^a"},
            ["$.allOf[1].pattern"],
        ),
        (
            {"$defs": {"P": {"type": "array", "contains": {}}}, "$ref": "#/$defs/P"},
            {"$ref": "#/$defs/P", "$defs": {"P": {"type": "array", "items": {}}}},
            ["$.$defs.P.contains"],
        ),
    ],
)
def test_exactly_what_cannot_be_enforced_is_left_out(
    checker: Checker, schema: Any, written: Any, left_out: list[str]
) -> None:
    assert _relaxed(schema) == (written, tuple(left_out))
    found = checker.verdict("json_schema", json.dumps(schema), "xgrammar", ["$"])
    assert found.refusal is None
    assert found.left_out == tuple(left_out)
    assert checker.verdict("json_schema", json.dumps(schema), "xgrammar").refusal


def test_an_expression_that_does_not_compile_is_left_out(checker: Checker) -> None:
    schema = {"properties": {"a": {"pattern": r"\bx\b"}, "b": {"pattern": "^[0-9]+$"}}}
    found = checker.verdict("json_schema", json.dumps(schema), "xgrammar", ["$"])
    assert found.refusal is None
    assert found.left_out == ("$.properties.a.pattern",)
    assert "[0-9]+" in found.text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "strange"},
        {"$ref": "#/$defs/x"},
        {"required": "a"},
        {"type": "string", "const": 1},
        {"enum": list(range(20_000))},
    ],
)
def test_what_is_malformed_or_too_large_is_still_refused(checker: Checker, schema: Any) -> None:
    assert checker.verdict("json_schema", json.dumps(schema), "xgrammar", ["$"]).refusal


def test_the_rest_of_a_document_is_strict(checker: Checker) -> None:
    odd = {"type": "array", "uniqueItems": True}
    schema = {"$defs": {"a1": odd, "a10": odd}, "anyOf": [{"$ref": "#/$defs/a1"}, TEXT]}
    assert (
        checker.verdict("json_schema", json.dumps(schema), "xgrammar", ["$.$defs.a1"]).refusal
        is None
    )
    schema["anyOf"] = [{"$ref": "#/$defs/a10"}, TEXT]
    refusal = checker.verdict("json_schema", json.dumps(schema), "xgrammar", ["$.$defs.a1"]).refusal
    assert refusal == "$.$defs.a10: uniqueItems is not supported"


def test_no_more_than_so_many_are_named(checker: Checker) -> None:
    schema = {"properties": {f"{i:02}" + "x" * 200: {"uniqueItems": True} for i in range(30)}}
    found = checker.verdict("json_schema", json.dumps(schema), "xgrammar", ["$"])
    assert (len(found.left_out), found.left_out_more) == (16, 14)
    assert max(map(len, found.left_out)) < 200


NAMES = ("a", "b")
VALUES: list[Any] = [
    *(None, True, 0, 1, 2, 1.5, "", "a", "abc", [], [1], [1, 1], ["a", 1], [1, 2, "a"]),
    *({}, {"a": 1}, {"b": "a"}, {"a": 1, "b": 2}, {"a": "abc", "c": 1}, {"a": {"a": 1}}),
]
ODD_NAMES = {"type": "object", "propertyNames": {"maxLength": 1}}
LEAVES = st.sampled_from(
    [
        *({"type": "integer"}, TEXT, TEXT | {"minLength": 2}, {"type": "number", "multipleOf": 2}),
        *({"enum": [1, "a", {"a": 1}]}, TEXT | {"pattern": "(?=a)a"}, TEXT | {"pattern": "^a+$"}),
        *({"uniqueItems": True}, {"contains": {"type": "integer"}}, {"$ref": "#/$defs/n"}, {}),
        *({"not": {"type": "string"}}, {"not": {"minLength": 1}}, ODD_NAMES),
    ]
)  # fmt: skip


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from(NAMES), inner, max_size=2)
    parts = st.lists(inner, min_size=1, max_size=2)
    # An object without `additionalProperties` becomes closed, which narrows it on purpose.
    objects = st.fixed_dictionaries(
        {
            "type": st.just("object"),
            "properties": properties,
            "additionalProperties": st.booleans() | inner,
        },
        optional={
            "required": st.just(["a"]),
            "patternProperties": st.sampled_from([{"^a$": TEXT}, {"(?!a)b": {"type": "integer"}}]),
            "dependentRequired": st.just({"a": ["b"]}),
            "if": inner,
            "then": inner,
            "else": inner,
            "dependentSchemas": st.just({"a": {"required": ["b"]}}),
            "not": inner,
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner},
        optional={"uniqueItems": st.just(True), "contains": inner, "prefixItems": parts},
    )
    joined = st.sampled_from(["allOf", "anyOf", "oneOf"]).flatmap(
        lambda keyword: parts.map(lambda some: {keyword: some})
    )
    return objects | arrays | joined


@settings(max_examples=300, suppress_health_check=list(HealthCheck), deadline=None)
@given(st.recursive(LEAVES, _schemas, max_leaves=5))
def test_all_that_is_valid_stays_valid(schema: Any) -> None:
    document = {**schema, "$defs": {"n": {"type": "integer", "multipleOf": 2}}}
    try:
        written, left_out = _relaxed(document)
    except ValueError:
        return
    if not left_out:
        return
    asked, found = Draft202012Validator(document), Draft202012Validator(written)
    for value in VALUES:
        if asked.is_valid(value):
            assert found.is_valid(value), (written, left_out, value)
