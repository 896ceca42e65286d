"""Random JSON schemas, regexes and grammars, most of them near the largest accepted size."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable
from typing import Any

from guides.kinds import Kind

_CLASSES = ("[a-z]", "[a-zA-Z]", "[0-9]", "[a-zA-Z0-9_ ]", "[^a]", "[ab]", "[^\\r\\n]", "[A-F0-9]")
_SIGNS = ("", "", "", "?", "*", "+", "{2}", "{0,3}", "{1,20}", "{3,}", "{0,60}")
_FORMATS = ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri")
_PATTERNS = (
    "^[a-z]+-[0-9]{1,5}$",
    "^#[0-9a-f]{6}$",
    "^[A-Z][a-z ]{1,30}$",
    "^v[0-9]+(\\.[0-9]+)*$",
)


def random_guide(draw: random.Random) -> tuple[Kind, str]:
    """Return the type and the text of a guide."""
    kind: Kind = draw.choice(("json_schema", "json_schema", "regex", "ebnf_grammar"))
    if kind == "json_schema":
        return kind, json.dumps(random_schema(draw))
    size = draw.choice((2, 4, 8, 16, 40, 100))
    if kind == "regex":
        return kind, _sequence(draw, _expression_atom, size, 3)
    names = [f"r{number}" for number in range(draw.choice((1, 2, 5, 20)))]
    rules = [
        f"{name} ::= {_sequence(draw, _grammar_atom(names[at + 1 :], 'root'), size, 2, ' ')}"
        for at, name in enumerate(names)
    ]
    return kind, "\n".join(["root ::= r0", *rules])


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """Return an object schema with up to 200 properties of one to three types."""
    count = draw.choice((1, 3, 5, 10, 20, 50, 100, 200)) if depth == 3 else draw.choice((1, 3, 6))
    kinds = draw.sample(_LEAVES, draw.randint(1, 3))
    properties: dict[str, Any] = {}
    for number in range(count):
        name = f"{_word(draw)}_{number}"
        is_deep = depth and draw.random() < 0.1
        properties[name] = _nested(draw, depth) if is_deep else draw.choice(kinds)(draw)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    share = draw.choice((0, 0.5, 1))
    schema["required"] = [name for name in properties if draw.random() < share]
    if draw.random() < 0.5:
        schema["additionalProperties"] = draw.choice((True, False, {"type": "string"}))
    return schema


def _nested(draw: random.Random, depth: int) -> dict[str, Any]:
    part = random_schema(draw, depth - 1)
    choice = draw.random()
    if choice < 0.4:
        return part
    if choice < 0.7:
        bounds = {"maxItems": draw.choice((1, 10, 100)), "minItems": draw.choice((0, 1, 5))}
        return {"type": "array", "items": part, **(bounds if draw.random() < 0.5 else {})}
    return {"anyOf": [part, {"type": "null"}, random_schema(draw, depth - 1)]}


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(string.ascii_lowercase, k=draw.choice((2, 6, 12))))


def _range(draw: random.Random) -> dict[str, Any]:
    top = 10 ** draw.choice((1, 2, 3, 4, 6, 9, 12, 15, 18))
    low, high = sorted(draw.sample(range(-top, top) if draw.random() < 0.3 else range(top), 2))
    bounds = {"minimum": low, "maximum": high}
    if draw.random() < 0.3:
        del bounds[draw.choice(("minimum", "maximum"))]
    return {"type": "integer", **bounds}


def _number(draw: random.Random) -> dict[str, Any]:
    places = draw.choice((0, 1, 2, 6))
    top = 10.0 ** draw.choice((0, 1, 3, 6))
    low, high = sorted(round(draw.uniform(-top, top), places) for _ in range(2))
    return {"type": "number", "minimum": low, "maximum": high}


def _text(draw: random.Random) -> dict[str, Any]:
    low, high = sorted(draw.choice((0, 1, 5, 20, 50, 100, 500)) for _ in range(2))
    return draw.choice(
        [
            {"type": "string"},
            {"type": "string", "minLength": low},
            {"type": "string", "minLength": low, "maxLength": high},
            {"type": "string", "format": draw.choice(_FORMATS)},
            {"type": "string", "pattern": draw.choice(_PATTERNS)},
            {"type": "string", "pattern": f"^{_sequence(draw, _expression_atom, 4, 2)}$"},
        ]
    )


_LEAVES: list[Callable[[random.Random], dict[str, Any]]] = [
    _range,
    _number,
    _text,
    lambda draw: {"type": draw.choice(("string", "integer", "number", "boolean", "null"))},
    lambda draw: {"enum": [_word(draw) for _ in range(draw.choice((2, 10, 50)))]},
    lambda draw: {"type": "array", "items": {"type": "string"}, "maxItems": draw.choice((1, 50))},
    lambda draw: {"type": ["string", "null"]},
    lambda draw: {"anyOf": [{"type": "integer"}, _text(draw), {"type": "null"}]},
    lambda draw: {},
]


def _sequence(
    draw: random.Random,
    atom: Callable[[random.Random], str],
    size: int,
    depth: int,
    space: str = "",
) -> str:
    """Return a sequence of random or equal parts."""
    same = None
    if draw.random() < 0.5:
        same = _part(draw, atom, depth, space)
    parts = [same or _part(draw, atom, depth, space) for _ in range(draw.randint(1, size))]
    return space.join(parts)


def _part(draw: random.Random, atom: Callable[[random.Random], str], depth: int, space: str) -> str:
    if depth and draw.random() < 0.3:
        branches = [
            _sequence(draw, atom, 3, depth - 1, space) for _ in range(draw.choice((1, 2, 3, 20)))
        ]
        return f"({'|'.join(branches)}){draw.choice(_SIGNS)}"
    return f"{atom(draw)}{draw.choice(_SIGNS)}"


def _expression_atom(draw: random.Random) -> str:
    return draw.choice((*_CLASSES, ".", "a", "b", "7", "ab"[: draw.randint(1, 2)]))


def _grammar_atom(names: list[str], again: str) -> Callable[[random.Random], str]:
    """Return a generator of atoms. Rules in `names` may be anywhere, `again` after a literal."""

    def atom(draw: random.Random) -> str:
        choice = draw.random()
        if names and choice < 0.2:
            return draw.choice(names)
        if choice < 0.25:
            return f'("," {again})'
        if choice < 0.5:
            return f'"{_word(draw)}"'
        return draw.choice((*_CLASSES, '"a"', '"ab"'))

    return atom
