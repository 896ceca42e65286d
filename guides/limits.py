"""Refuse guides that would take an engine too long to compile.

An engine compiles a guide inside a step, for which everybody waits. xgrammar writes counted
repetitions out, so the size after that is limited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from guides.ebnf import parts_of
from guides.expressions import Part
from guides.expressions import parts_of as parts_of_expression
from guides.kinds import MAX_CHARS, Backend, Kind

# xgrammar 0.1.25 takes a tenth of a second for 1,000 words of 17 characters, and half a second for
# 500 optional properties: after each of these any later one may follow.
MAX_WEIGHT = 10_000
_OPTIONAL = 50

_DATA = frozenset({"const", "default", "enum", "examples"})
_COUNTS = ("minItems", "maxItems")
_LENGTHS = ("minLength", "maxLength")


def check(kind: Kind, text: str, backend: Backend) -> None:
    """Raises ValueError, and RecursionError for JSON that is nested too deep."""
    check_length(text)
    weight = 0
    if kind == "regex":
        weight = _weight_of_expression(text)
    elif kind == "json_schema":
        weight = _weight_of_schema(json.loads(text))
    elif kind == "ebnf_grammar" and backend == "xgrammar":
        weight = _weight_of_parts(parts_of(text))
    if weight > MAX_WEIGHT:
        raise _too_large()


def check_length(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise ValueError(f"it has {len(text)} characters; allowed: {MAX_CHARS}")


def _weight_of_schema(schema: Any) -> int:
    if isinstance(schema, list):
        return sum([_weight_of_schema(part) for part in schema])
    if not isinstance(schema, dict):
        return 1
    weight = 1
    for keyword, value in schema.items():
        if keyword == "pattern" and isinstance(value, str):
            weight += _weight_of_expression(value)
        elif keyword in _DATA:
            weight += _weight_of_data(value)
        else:
            weight += _weight_of_schema(value)
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict):
        optional = len(properties) - (len(required) if isinstance(required, list) else 0)
        weight += max(0, optional) ** 2 // _OPTIONAL
    return weight * _largest(schema, _COUNTS) + _largest(schema, _LENGTHS)


def _weight_of_data(data: Any) -> int:
    if isinstance(data, dict):
        data = list(data.values())
    return 1 + (sum(map(_weight_of_data, data)) if isinstance(data, list) else 0)


def _largest(schema: dict[str, Any], names: tuple[str, ...]) -> int:
    """At least 1. What is no number is for the compiler to refuse."""
    found = [schema.get(name) for name in names]
    return max([1, *[int(number) for number in found if isinstance(number, int | float)]])


def _weight_of_expression(text: str) -> int:
    return _weight_of_parts(parts_of_expression(text))


def _weight_of_parts(parts: Iterator[Part]) -> int:
    """How many parts there are once each counted repetition is written out as often as it says."""
    groups = [0]
    last = 0
    for kind, text in parts:
        if kind == "open":
            groups.append(0)
        elif kind == "close":
            last = groups.pop() if len(groups) > 1 else last
            groups[-1] += last
        elif kind == "times":
            counts = re.findall(r"\d+", text)
            if max(map(len, counts)) > len(str(MAX_WEIGHT)):
                raise _too_large()
            times = max(1, *map(int, counts))
            groups[-1] += last * (times - 1)
            last *= times
        elif kind not in ("or", "sign"):
            # A string is one state for each of its characters, and cheaper than a choice.
            last = 1 + len(text) // 8
            groups[-1] += last
        if groups[-1] > MAX_WEIGHT:
            raise _too_large()
    return sum(groups)


def _too_large() -> ValueError:
    return ValueError("it is too large, with its counted repetitions written out")
