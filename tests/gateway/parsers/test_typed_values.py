"""Typed values of tool call arguments that a model writes as plain text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from gateway.parsers.tools.typed_values import as_json, types_of
from tests.support.cpu import costs_less_than

CYCLE: dict[str, Any] = {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}, {"$ref": "#/x/y"}]}
DEFS = {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/properties/p"}, {"type": "integer"}]}}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", "b"]}, {"string"}),
        ({"enum": ["a", 1, None]}, {"string", "integer", "number", "null"}),
        ({"const": True}, {"boolean"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}]}]}, {"string", "null"}),
        ({"allOf": [{"$ref": "#/$defs/A"}], "default": "a"}, {"integer"}),
        (CYCLE, {"integer", "null"}),
        ({"description": "anything"}, set()),
        ({"$ref": "https://example.org/schema"}, set()),
        ({"type": 1, "enum": 2}, set()),
        (True, set()),
        ("string", set()),
    ],
)
def test_types_of_a_parameter(schema: Any, types: set[str]) -> None:
    assert types_of({"properties": {"p": schema}, "$defs": DEFS}, "p") == types
    assert types_of({"properties": {"p": schema}}, "q") == set()


@pytest.mark.parametrize(
    ("make", "types"),
    [
        (lambda: {"anyOf": [{"enum": [n]} for n in range(50_000)]}, {"integer", "number"}),
        (lambda: {"anyOf": [{"enum": [0] * 1_000} for _ in range(1_000)]}, {"integer", "number"}),
        # Invalid schemas and the types in a list count against the size limit, too.
        (lambda: {"anyOf": [0] * 1_000_000}, set()),
        (lambda: {"type": ["string"] * 1_000_000}, {"string"}),
        (lambda: {"enum": ["a"] * 1_000_000}, {"string"}),
        (lambda: {"$ref": "#" + "/a" * 1_000_000}, set()),
    ],
    ids=["alternatives", "values", "numbers", "types", "enum", "reference"],
)
def test_a_huge_schema_costs_no_more_than_a_large_one(
    make: Callable[[], Any], types: set[str]
) -> None:
    schema = make()
    assert types_of({"properties": {"p": schema}}, "p") == types
    large = {"anyOf": [{"enum": [n]} for n in range(1_000)]}
    # Reading the huge schema completely would take 18 times as long or more. Compare a ratio, as
    # other tests may slow this process.
    assert _seconds(schema) < 6 * _seconds(large)


def _seconds(schema: Any) -> float:
    """Return the least CPU time of this thread over five runs, in seconds."""
    found = []
    for _ in range(5):
        start = time.thread_time()
        types_of({"properties": {"p": schema}}, "p")
        found.append(time.thread_time() - start)
    return min(found)


@pytest.mark.parametrize("parameters", [None, {}, {"properties": ["p"]}, {"properties": None}])
def test_a_schema_without_parameters_says_nothing(parameters: Any) -> None:
    assert types_of(parameters, "p") == set()


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        (" 3\n", "integer", 3),
        ("3.0", "number", 3.0),
        ("three", "integer", "three"),
        (" three ", "integer", " three "),
        ("True", "boolean", True),
        ("None", "array", None),
        ('[1, {"a": "b"}]', "array", [1, {"a": "b"}]),
        ("['p', 'q']", "array", ["p", "q"]),
        (
            "{'k': True, 'n': None, \"it's\": [1, -2.5e3],}",
            "object",
            {"k": True, "n": None, "it's": [1, -2500.0]},
        ),
        (
            "{'a': {'b': ('c', 1)}, 2: 'caf\\u00e9 \\'x\\' \\n'}",
            "object null",
            {"a": {"b": ["c", 1]}, "2": "café 'x' \n"},
        ),
        ("('a',)", "array", ["a"]),
        ("('a')", "array", "('a')"),
        ("['a']", "string", "['a']"),
        ("['a']", "string array", ["a"]),
        ("['a']", "string object", "['a']"),
        ("['a']", "", "['a']"),
        # Not literals
        ("[p, q]", "array", "[p, q]"),
        ("['a', 1.2.3]", "array", "['a', 1.2.3]"),
        ("['a', 1+2]", "array", "['a', 1+2]"),
        ("['a', f(1)]", "array", "['a', f(1)]"),
        ("['a'] or 'b'", "array", "['a'] or 'b'"),
        ("{'a': 1", "object", "{'a': 1"),
        ("['a', 'b", "array", "['a', 'b"),
        ("{'a'}", "object", "{'a'}"),
        ("[" * 40 + "]" * 40 + "'", "array", "[" * 40 + "]" * 40 + "'"),
        ("[1, 2", "array", "[1, 2"),
        ("NaN", "number", "NaN"),
        ("", "object", ""),
        ("[" * 100_000, "array", "[" * 100_000),
        # No declared type: the value is JSON if it parses as JSON.
        ("3", "", 3),
        ('"a"', "", "a"),
        ("a", "", "a"),
        # A string or one other type
        ("3", "string integer", 3),
        ("3", "string null", "3"),
        ("None", "string null", None),
        ('"a"', "string null", '"a"'),
        ("[1]", "string null", "[1]"),
        ('a "b"\n🦉', "string null", 'a "b"\n🦉'),
    ],
)
def test_values(text: str, types: str, value: Any) -> None:
    assert json.loads(as_json(text, frozenset(types.split()))) == value


def test_the_time_of_a_literal_is_bounded() -> None:
    """The event loop parses values, so one value must not block it for long."""
    units = ["'a', ", "1, ", "'\\", '"', "[", "1", "1.", "'a' ", "\\"]
    for text in [
        f"['a', {unit * (size // len(unit))}]" for unit in units for size in (16_000, 2**20)
    ]:
        with costs_less_than(0.4):
            as_json(text, frozenset({"array"}))


def test_numbers_stay_as_they_were_written() -> None:
    written = "1.10e3", "123456789012345678901234567890"
    assert tuple(as_json(text, frozenset({"number"})) for text in written) == written
