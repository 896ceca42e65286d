"""The schemas that pydantic makes: what clients send most. Each compiles, and means the same."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, StringConstraints, TypeAdapter

from guides.worker import Checker


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: Annotated[str, StringConstraints(pattern="^[A-Z][a-z]*$")]


class Tree(BaseModel):
    value: int
    children: list[Tree] = []
    colour: Colour | None = None


class Forest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    first: Annotated[Tree, Field(description="a reference beside an annotation")]
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]


Word = Annotated[str, StringConstraints(min_length=2, max_length=3)]
Code = Annotated[str, StringConstraints(pattern="^[a-z]+$", max_length=3)]
CAT = {"kind": "cat", "lives": 9}
TREE = {"value": 1, "children": [{"value": 2, "children": [], "colour": None}], "colour": "red"}
ID = "123e4567-e89b-12d3-a456-426614174000"
TYPES: list[tuple[Any, list[Any], list[Any]]] = [
    (Literal["a", 1, None], ["a", 1, None], ["b", 2, True]),
    (int | str | None, [1, "a", None], [1.5, []]),
    (Annotated[int, Field(gt=0, lt=10)], [1, 9], [0, 10]),
    (Annotated[float, Field(ge=0, le=1)], [0, 0.5, 1], [-1, 2]),
    (Word, ["ab"], ["a", "abcd"]),
    (Code, ["abc"], ["", "abcd", "A"]),
    (dict[str, int], [{}, {"a": 1}], [{"a": "b"}]),
    (dict[Literal["x", "y"], int], [{"x": 1}, {}], [{"z": 1}]),
    (dict[Annotated[str, StringConstraints(pattern="^x")], int], [{"x1": 1}], [{"y": 1}]),
    (tuple[str, int], [["a", 1]], [["a"], ["a", 1, 2], [1, "a"]]),
    (tuple[int, ...], [[], [1, 2]], [["a"]]),
    (Annotated[list[int], Field(min_length=1, max_length=2)], [[1]], [[], [1, 2, 3]]),
    (dict[Colour, int], [{"red": 1}, {}], [{"red": "x"}, {"pink": 1}]),
    (dt.datetime, ["2024-01-01T00:00:00Z"], [1]),
    (uuid.UUID, [ID], ["x"]),
    (HttpUrl, ["https://example.com/"], ["", 1]),
    (Cat, [CAT, {"lives": 0}], [{"kind": "dog", "lives": 1}, {"lives": 10}]),
    (Tree, [TREE], [{"value": "x"}, {"value": 1, "colour": "green"}]),
    (Forest, [{"first": TREE, "pets": [CAT, {"kind": "dog", "name": "Rex"}]}],
     [{"first": TREE, "pets": [{"kind": "dog", "lives": 1}]}, {"first": {}, "pets": []}]),
]  # fmt: skip


@pytest.fixture(scope="module")
def checker() -> Checker:
    # Newer releases take a second for the length of a URL, which a strict schema then may not have.
    return Checker("0.1.25")


@pytest.mark.parametrize(("made_of", "good", "bad"), TYPES)
@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_they_are_enforced(
    checker: Checker, made_of: Any, good: list[Any], bad: list[Any], backend: Any
) -> None:
    schema = TypeAdapter(made_of).json_schema()
    refusal, text, *_ = checker.verdict("json_schema", json.dumps(schema), backend)
    assert refusal is None
    said = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    written = Draft202012Validator(
        json.loads(text), format_checker=Draft202012Validator.FORMAT_CHECKER
    )
    for value in good:
        assert said.is_valid(value)
        assert written.is_valid(value), (text, value)
    assert not any(map(written.is_valid, bad)), text


@pytest.mark.parametrize(
    ("made_of", "expected"),
    [
        (set[int], "$: uniqueItems is not supported"),
        (dict[Word, int], "$.propertyNames: propertyNames with"),
        (Annotated[int, Field(multiple_of=5)], "$: multipleOf is not supported"),
    ],
)
def test_what_xgrammar_would_pass_over_is_refused(
    checker: Checker, made_of: Any, expected: str
) -> None:
    schema = TypeAdapter(made_of).json_schema()
    refusal, *_ = checker.verdict("json_schema", json.dumps(schema), "xgrammar")
    assert refusal is not None
    assert refusal.startswith(expected)
