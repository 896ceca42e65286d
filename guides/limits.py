"""What is refused although it is a grammar: the engine would fail on it, or take too long.

An engine compiles a guide inside a step, for which everybody waits. xgrammar writes counted
repetitions out, so what is limited is the size after that. And some of what other libraries take
throws in xgrammar, or did in the releases of it that were tried: 0.1.8, 0.1.13, 0.1.18, 0.1.25.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from guides.ebnf import parts_of
from guides.kinds import MAX_CHARS, Backend, Kind

# xgrammar 0.1.25 takes a tenth of a second for 1,000 words of 17 characters, and half a second for
# 500 optional properties: after each of these any later one may follow.
MAX_WEIGHT = 10_000
_OPTIONAL = 50

_DATA = frozenset({"const", "default", "enum", "examples"})
_COUNTS = ("minItems", "maxItems")
_LENGTHS = ("minLength", "maxLength")
# Every text has one way to be cut up by this, in linear time: what is not closed goes to the end.
_EXPRESSION = re.compile(
    r"""
      (?P<escape> \\ (?s:.) | \\ \Z )
    | (?P<class>  \[ \^? \]? (?: [^\]\\] | \\ (?s:.) )* (?: \] | \\? \Z ) )
    | (?P<open>   \( (?: \? (?: : | P?<[^=!>]* )? )? )
    | (?P<close>  \) )
    | (?P<or>     \| )
    | (?P<times>  \{ \d+ (?: , \d* )? \} )
    | (?P<sign>   [*+?] )
    | (?P<part>   (?s:.) )
    """,
    re.VERBOSE,
)

Part = tuple[str, str]
"""What it is (``open``, ``close``, ``or``, ``times``, ``sign``, else a part), and its text."""


def check(kind: Kind, text: str, backend: Backend) -> None:
    """Raises ValueError, and RecursionError for JSON that is nested too deep."""
    check_length(text)
    weight = 0
    if kind == "regex":
        weight = _weight_of_expression(text, backend)
    elif kind == "json_schema":
        weight = _weight_of_schema(json.loads(text), backend)
    elif kind == "ebnf_grammar" and backend == "xgrammar":
        weight = _weight_of_parts(parts_of(text))
    if weight > MAX_WEIGHT:
        raise _too_large()


def check_length(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise ValueError(f"it has {len(text)} characters; allowed: {MAX_CHARS}")


def _weight_of_schema(schema: Any, backend: Backend) -> int:
    if isinstance(schema, list):
        return sum([_weight_of_schema(part, backend) for part in schema])
    if not isinstance(schema, dict):
        return 1
    weight = 1
    for keyword, value in schema.items():
        if keyword == "pattern" and isinstance(value, str):
            weight += _weight_of_expression(value, backend)
        elif keyword in _DATA:
            weight += _weight_of_data(value)
        else:
            weight += _weight_of_schema(value, backend)
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


def _weight_of_expression(text: str, backend: Backend) -> int:
    parts = [(found.lastgroup or "", found.group()) for found in _EXPRESSION.finditer(text)]
    if backend == "xgrammar":
        _check_expression(parts)
    return _weight_of_parts(iter(parts))


def _check_expression(parts: list[Part]) -> None:
    """Raises ValueError for what xgrammar throws on and llguidance does not."""
    before = "or"
    for kind, text in [*parts, ("end", "")]:
        if (before == "or" and kind in ("or", "close", "end")) or (before, kind) == ("open", "or"):
            raise ValueError("an alternative of the expression is empty")
        if kind == "open" and text.startswith("(?P"):
            raise ValueError(f"{text}: the name of a group is written (?<name>")
        if (kind, text) == ("open", "(?"):
            raise ValueError("(?: groups have no flags, and nothing looks ahead or back")
        if kind == "escape" and text in ("\\", "\\p", "\\P"):
            raise ValueError(f"{text}: classes of Unicode are not known here")
        if before == "repeated" and (kind == "times" or text in ("*", "+")):
            raise ValueError(f"{text}: a repetition is repeated, without parentheses around it")
        if kind not in ("times", "sign"):
            before = kind
        else:  # a ? after a repetition makes it lazy
            before = "lazy" if before == "repeated" else "repeated"


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
