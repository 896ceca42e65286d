"""Rewritten schemas are equivalent: the same values are valid for both."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from guides.schema.rewrite import rewrite

NAMES = ("a", "b", "c")
SCALARS = [None, True, False, -1, 0, 1, 2, 1.5, "", "a", "ab", "abc"]
FEW = [0, 1, 2, "a", "abc"]
OBJECTS = [
    {name: value for name, value in zip(NAMES, values, strict=True) if value is not None}
    for values in product([None, 1, 2, "abc"], repeat=len(NAMES))
]
ARRAYS = [list(items) for count in range(3) for items in product(FEW, repeat=count)]
VALUES = [*SCALARS, *ARRAYS, *OBJECTS, [1, 1, 1], {"d": 1}, {"a": {"a": {}}}, [{"b": 1}], [[]]]


def _some(kind: str, **keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    some = st.fixed_dictionaries({}, optional=keywords)
    return some.map(lambda said: {"type": kind, **said}) if kind else some


BOUND = st.sampled_from([-1, 0, 1, 1.5, 2])
COUNT = st.integers(0, 3)
BOUNDS = dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), BOUND)
STRINGS = _some("string", minLength=COUNT, maxLength=COUNT)
NUMBERS = _some("integer", **BOUNDS) | _some("number", **BOUNDS)
CHOSEN = st.lists(st.sampled_from(VALUES), min_size=1, max_size=4).map(lambda some: {"enum": some})
LEAVES = st.one_of(
    STRINGS,
    NUMBERS,
    CHOSEN,
    st.sampled_from(VALUES).map(lambda value: {"const": value}),
    st.sampled_from([{}, {"type": "boolean"}, {"type": ["string", "integer"], "minLength": 2}]),
    st.sampled_from([{"$ref": "#/$defs/text"}, {"$ref": "#/$defs/tree", "maxProperties": 1}]),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    names = st.lists(st.sampled_from(NAMES), unique=True, max_size=2)
    said = _some(
        "object",
        properties=st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
        required=names,
        propertyNames=st.sampled_from([{"enum": ["a", "b"]}, {"type": "string"}, {"const": "c"}]),
        dependentRequired=st.dictionaries(st.sampled_from(NAMES), names, max_size=2),
        minProperties=COUNT,
        maxProperties=COUNT,
    )
    # Without `additionalProperties` an object is closed by the rewrite, which is not equivalent.
    more = st.booleans() | inner
    return st.builds(lambda said, more: {"additionalProperties": more, **said}, said, more)


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = _some(
        "array",
        items=inner | st.just(False),
        prefixItems=st.lists(inner, min_size=1, max_size=2),
        minItems=COUNT,
        maxItems=COUNT,
    )
    alike = [
        st.lists(kind, min_size=2, max_size=3)
        for kind in (_objects(inner), arrays, STRINGS, NUMBERS, CHOSEN | inner)
    ]
    joined = st.one_of(*alike).flatmap(
        lambda parts: st.sampled_from(
            [
                {"allOf": parts},
                {"anyOf": parts},
                {"oneOf": parts},
                {**parts[0], "anyOf": parts[1:]},
                {**parts[0], "oneOf": parts[1:]},
            ]
        )
    )
    return joined | _objects(inner) | arrays


SCHEMAS = st.recursive(LEAVES, _schemas, max_leaves=5)
DEFS = {
    "text": {"type": "string", "minLength": 1},
    "tree": {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/tree"}},
        "additionalProperties": False,
    },
}


@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
@given(_schemas(SCHEMAS))
def test_the_same_values_are_valid(schema: dict[str, Any]) -> None:
    document = {**schema, "$defs": DEFS}
    asked = Draft202012Validator(document)
    written, refusal = _written(document)
    if written is not None:
        found = Draft202012Validator(written)
        for value in VALUES:
            assert asked.is_valid(value) == found.is_valid(value), (written, value)
    elif refusal == "$: nothing is valid for all that it says":
        assert not any(map(asked.is_valid, VALUES))


def _written(schema: Any) -> tuple[Any, str]:
    try:
        return rewrite(schema, "xgrammar"), ""
    except ValueError as error:
        return None, str(error)


TEXT = {"type": "string"}
WHOLE = {"type": "integer"}
CLOSED = {"type": "object", "additionalProperties": False}


def _kind(tag: str) -> dict[str, Any]:
    return {"properties": {"kind": {"const": tag}}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        # Objects are closed unless `additionalProperties` says otherwise.
        (
            {"properties": {"a": {"properties": {}}}, "required": ["a"]},
            {**CLOSED, "properties": {"a": CLOSED}, "required": ["a"]},
        ),
        (
            {"properties": {"a": TEXT}, "additionalProperties": True},
            {"type": "object", "properties": {"a": TEXT}, "additionalProperties": {}},
        ),
        ({"type": "object"}, {"type": "object", "additionalProperties": {}}),
        ({"enum": [{"properties": {"a": 1}}]}, {"const": {"properties": {"a": 1}}}),
        # A schema without a type gets the type to which its keywords apply.
        ({"minLength": 1}, {"type": "string", "minLength": 1}),
        (
            {"allOf": [{"minLength": 1}, {"type": ["string", "null"]}]},
            {"anyOf": [{"type": "string", "minLength": 1}, {"type": "null"}]},
        ),
        (
            {"allOf": [{"required": ["a"]}, {"properties": {"a": {"minimum": 1}}}]},
            {
                **CLOSED,
                "properties": {"a": {"type": "number", "minimum": 1}},
                "required": ["a"],
            },
        ),
        (
            {"oneOf": [_kind("a"), _kind("b")]},
            {"anyOf": [{**CLOSED, **_kind("a")}, {**CLOSED, **_kind("b")}]},
        ),
        # Annotations and unknown keywords do not affect validity.
        ({"type": "integer", "title": "t", "default": 1, "x-guidance": {}, "$id": "i"}, WHOLE),
        ({"type": "string", "format": "made-up"}, TEXT),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        (
            {"type": "string", "format": "uri", "minLength": 1},
            {"type": "string", "minLength": 1},
        ),
        # xgrammar enforces either a pattern or a length, so the length is merged into the pattern.
        (
            {"type": "string", "pattern": "^[a-z]+$", "maxLength": 3},
            {"type": "string", "pattern": "^[a-z]{1,3}$"},
        ),
        ({"type": "integer", "exclusiveMinimum": 0}, {"type": "integer", "minimum": 1}),
        (
            {"type": "object", "propertyNames": {"pattern": "^x"}, "additionalProperties": WHOLE},
            {**CLOSED, "patternProperties": {"^x": WHOLE}},
        ),
        (
            {"propertyNames": {"enum": ["a"]}, "properties": {"a": TEXT, "b": TEXT}},
            {**CLOSED, "properties": {"a": TEXT}},
        ),
        (
            {"allOf": [{"properties": {"a": {}}}, {"additionalProperties": TEXT}]},
            {"type": "object", "properties": {"a": TEXT}, "additionalProperties": TEXT},
        ),
        (
            {"type": "array", "items": [TEXT], "additionalItems": False},
            {"type": "array", "prefixItems": [TEXT], "items": False},
        ),
        (
            {"$defs": {"a/b": TEXT}, "items": {"$ref": "#/$defs/a~1b", "description": "d"}},
            {
                "type": "array",
                "items": {"$ref": "#/$defs/schema_0"},
                "$defs": {"schema_0": TEXT},
            },
        ),
        (
            {"properties": {"a": {"$ref": "#"}}},
            {**CLOSED, "properties": {"a": {"$ref": "#"}}},
        ),
    ],
)
def test_it_is_written_for_the_compiler(schema: Any, written: Any) -> None:
    assert rewrite(schema, "xgrammar") == written


def test_a_tag_tells_branches_apart() -> None:
    def branch(tag: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": tag}}}

    schema = {
        "$defs": {"A": branch("a"), "B": branch("b")},
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "discriminator": {"propertyName": "kind"},
    }
    written = rewrite(schema, "xgrammar")
    assert [branch["required"] for branch in written["$defs"].values()] == [["kind"], ["kind"]]
    with pytest.raises(ValueError, match=r"\$: oneOf: a value may be valid for both \[0\] and"):
        rewrite({**schema, "discriminator": None}, "xgrammar")


def _in_tags(schema: Any) -> Any:
    return {"properties": {"tags": schema}}


@pytest.mark.parametrize(
    ("schema", "refusal"),
    [
        (_in_tags({"uniqueItems": True}), "$.properties.tags: uniqueItems is not supported"),
        (_in_tags({"not": {}}), "$.properties.tags: not is not supported"),
        ({"items": {"if": {}}}, "$.items: if is not supported"),
        ({"anyOf": [{}, {"contains": {}}]}, "$.anyOf[1]: contains is not supported"),
        ({"multipleOf": 5}, "$: multipleOf is not supported"),
        ({"$defs": {"a b": {"not": {}}}, "$ref": "#/$defs/a b"}, "$.$defs['a b']: not is"),
        (_in_tags({"type": "foo"}), "$.properties.tags: type: found 'foo'; allowed: object, "),
        ({"required": None}, "$: required: found null; allowed: a list of names"),
        ({"required": [[1]]}, "$: required: found something else; allowed: a list of names"),
        ({"minLength": True}, "$: minLength: found true; allowed: an integer from 0 on"),
        ({"items": {"$ref": "http://x/y"}}, "$.items: $ref: http://x/y cannot be followed"),
        ({"items": {"$ref": "#/$defs/x"}}, "$.items: $ref: #/$defs/x does not exist"),
        (
            {"allOf": [{"$ref": "#"}, {"type": "string"}]},
            "$.allOf[0]: $ref: # leads back to itself",
        ),
        (
            {"allOf": [{"pattern": "^a"}, {"type": "string", "pattern": "b$"}]},
            "$.allOf[1]: pattern beside another pattern is not supported",
        ),
        ({"pattern": "^a+b$", "minLength": 3}, "$: minLength beside pattern is not supported"),
        (
            {"type": "object", "propertyNames": {"maxLength": 3}},
            "$.propertyNames: propertyNames with maxLength is not supported",
        ),
        ({"type": "string", "const": 1}, "$: nothing is valid for all that it says"),
        (
            {"type": "integer", "minimum": 2**63},
            "$: minimum is 9223372036854775808; the bounds of integers have 64 bits",
        ),
    ],
)
def test_what_nothing_enforces_is_refused_with_its_place(schema: Any, refusal: str) -> None:
    assert _written(schema)[1].startswith(refusal)


_A, _B = ({"$ref": f"#/$defs/{name}"} for name in "ab")
_NULL = {"type": "null"}


@pytest.mark.parametrize(
    ("schema", "refusal"),
    [
        ({"anyOf": [{"$ref": "#"}, _NULL]}, "$: $ref: # leads back to itself"),
        (
            {"$defs": {"a": {"anyOf": [_NULL, _A]}}, "properties": {"x": _A}},
            "$.$defs.a: $ref: #/$defs/a leads back to itself",
        ),
        (
            {"$defs": {"a": {"anyOf": [_NULL, _B]}, "b": _A}, "items": _A, "type": "array"},
            "$.$defs.a: $ref: #/$defs/a leads back to itself",
        ),
    ],
)
def test_an_alternative_of_itself_is_refused_for_xgrammar(schema: Any, refusal: str) -> None:
    with pytest.raises(ValueError, match="leads back to itself") as raised:
        rewrite(schema, "xgrammar")
    assert str(raised.value) == refusal
    rewrite(schema, "llguidance")


def test_llguidance_enforces_more() -> None:
    for schema in ({"type": "integer", "multipleOf": 5}, {"type": "string", "pattern": "^a+b$"}):
        assert rewrite(schema | {"maxLength": 9}, "llguidance")["type"] == schema["type"]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"anyOf": [{"minLength": n} for n in range(9)]}] * 9},
        {"oneOf": [{"const": n} for n in range(500)]},
        {"$defs": {"a": {"anyOf": [{"items": {"$ref": "#/$defs/a"}}] * 9}}, "$ref": "#/$defs/a"},
    ],
)
def test_it_grows_no_further_than_so_much(schema: Any) -> None:
    written, refusal = _written(schema)
    assert "too large" in refusal if written is None else len(str(written)) < 2000


def test_an_integer_is_a_number() -> None:
    with pytest.raises(ValueError, match=r"oneOf: a value may be valid for both"):
        rewrite({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "xgrammar")


def test_what_holds_for_all_items_holds_for_the_first() -> None:
    schemas = [{"type": "array", "prefixItems": [TEXT]}, {"type": "array", "items": WHOLE}]
    # No item can be both a string and an integer.
    assert rewrite({"allOf": schemas}, "xgrammar") == {"type": "array", "items": False}
