"""Limits of guides: a guide is refused if an engine would take too long to compile it.

An engine compiles a guide in a decoding step, so all requests that the engine runs must wait. This
module limits two numbers. The first is the size of the guide after counted repetitions such as
``a{3}`` are written out, as in ``aaa``. This size bounds the memory that a compiler needs. The
second is the estimated CPU time that xgrammar needs for the guide (`guides.releases`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from guides import automaton
from guides.ebnf import parts_of
from guides.expressions import Part
from guides.expressions import parts_of as parts_of_expression
from guides.kinds import MAX_CHARS, Backend, Kind
from guides.releases import MAX_COST_US, NEWEST, Costs
from guides.schema import costs as schema_costs

MAX_WEIGHT = 10_000
_OPTIONAL = 50
_ADVICE = {
    schema_costs.NAMES: "use fewer or shorter names and values",
    schema_costs.SCHEMAS: "use fewer properties and alternatives",
    schema_costs.REFERENCES: "use fewer of them",
    schema_costs.OPTIONAL: "require more properties, or divide them among several objects",
    schema_costs.OPEN: "set additionalProperties to false",
    schema_costs.RANGES: "use bounds with fewer digits, or equal bounds, or none",
    schema_costs.COUNTS: "use smaller values of minItems and maxItems, or none",
    schema_costs.LENGTHS: "use smaller or equal values of minLength and maxLength, or none",
    schema_costs.FORMATS: "use fewer formats",
    schema_costs.PATTERNS: "use fewer repetitions and optional parts in patterns",
}

_DATA = frozenset({"const", "default", "enum", "examples"})
_COUNTS = ("minItems", "maxItems")
_LENGTHS = ("minLength", "maxLength")


def check(kind: Kind, text: str, backend: Backend, costs: Costs = NEWEST) -> None:
    """Check that a guide is not too large for an engine.

    Raises:
        ValueError: the guide is too large. The message has the size found and the allowed size.
        RecursionError: the text is JSON that is nested too deep.
    """
    check_length(text)
    weight = 0
    if kind == "regex":
        weight = _weight_of_expression(text)
    elif kind == "json_schema":
        schema = json.loads(text)
        # Ignore minItems and maxItems for xgrammar, which compiles the `items` schema only once.
        counts = () if backend == "xgrammar" else _COUNTS
        weight = _weight_of_schema(schema, counts)
    elif kind == "ebnf_grammar" and backend == "xgrammar":
        weight = _weight_of_parts(parts_of(text))
    if weight > MAX_WEIGHT:
        raise _too_large(str(weight))
    if backend == "xgrammar":
        _check_cost(kind, text, costs)


def _check_cost(kind: Kind, text: str, costs: Costs) -> None:
    if kind == "json_schema":
        found = schema_costs.costs_of(json.loads(text), costs)
        cost: float = found.total()
        if cost > MAX_COST_US:
            what, share = found.most_common(1)[0]
            of_it = f", {share / cost:.0%} of it for {what}"
            raise _too_slow(cost, of_it, _ADVICE[what])
    elif kind != "json":
        is_ebnf = kind == "ebnf_grammar"
        parts = parts_of(text) if is_ebnf else parts_of_expression(text)
        cost = automaton.cost_of(parts, costs, is_ebnf=is_ebnf)
        if cost > MAX_COST_US:
            raise _too_slow(cost, "", "use fewer repetitions, optional parts and alternatives")


def _too_slow(cost: float, of_it: str, advice: str) -> ValueError:
    # Round up: an estimate just above the limit must not look equal to the limit.
    seconds = f"about {math.ceil(cost / 1e3) / 1e3:.3f} s" if cost < 1e7 else "more than 10 s"
    if cost == math.inf:  # the estimate was ended
        seconds = "more than 1 s"
    return ValueError(
        f"it would take xgrammar {seconds} to compile{of_it}; allowed: {MAX_COST_US / 1e6:.2f} s; "
        f"{advice}"
    )


def check_length(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise ValueError(f"it has {len(text)} characters; allowed: {MAX_CHARS}")


def _weight_of_schema(schema: Any, counts: Sequence[str]) -> int:
    if isinstance(schema, list):
        return sum([_weight_of_schema(part, counts) for part in schema])
    if not isinstance(schema, dict):
        return 1
    weight = 1
    for keyword, value in schema.items():
        if keyword == "pattern" and isinstance(value, str):
            weight += _weight_of_expression(value)
        elif keyword in _DATA:
            weight += _weight_of_data(value)
        else:
            weight += _weight_of_schema(value, counts)
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict):
        optional = len(properties) - (len(required) if isinstance(required, list) else 0)
        weight += max(0, optional) ** 2 // _OPTIONAL
    return weight * _largest(schema, counts) + _largest(schema, (*_LENGTHS, *_COUNTS))


def _weight_of_data(data: Any) -> int:
    if isinstance(data, dict):
        data = list(data.values())
    return 1 + (sum(map(_weight_of_data, data)) if isinstance(data, list) else 0)


def _largest(schema: dict[str, Any], names: Sequence[str]) -> int:
    """Return the largest value of the keywords `names` in a schema, but at least 1.

    Values that are not numbers are ignored here, because the compiler refuses them later.
    """
    found = [schema.get(name) for name in names]
    return max([1, *[int(number) for number in found if isinstance(number, int | float)]])


def _weight_of_expression(text: str) -> int:
    return _weight_of_parts(parts_of_expression(text))


def _weight_of_parts(parts: Iterator[Part]) -> int:
    """Return the size of a regular expression or grammar, with counted repetitions written out.

    The size is the number of tokens. A long string or class counts as several tokens.
    """
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
                raise _too_large(f"more than {MAX_WEIGHT}")
            times = max(1, *map(int, counts))
            groups[-1] += last * (times - 1)
            last *= times
        elif kind not in ("or", "sign"):
            # Count 8 characters of a string or class as one token. The compiler makes a state for
            # each character, but such a state costs less than a separate token.
            last = 1 + len(text) // 8
            groups[-1] += last
        if groups[-1] > MAX_WEIGHT:
            raise _too_large(f"at least {groups[-1]}")
    return sum(groups)


def _too_large(found: str) -> ValueError:
    return ValueError(
        f"its size is {found}; allowed: {MAX_WEIGHT}; divide it, or use smaller counts and fewer "
        "optional properties: the size includes each copy of a counted part, and pairs of optional "
        "properties"
    )
