"""Estimated CPU time that xgrammar takes to compile a JSON schema, by feature of the schema."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal
from functools import lru_cache
from typing import Any

from guides import automaton
from guides.expressions import parts_of
from guides.releases import Costs
from guides.schema import lengths

NAMES = "names and values"
SCHEMAS = "schemas"
REFERENCES = "references to one definition, or equal parts"
OPTIONAL = "optional properties"
OPEN = "properties of objects that allow others"
RANGES = "ranges of numbers"
LENGTHS = "lengths of strings"
PATTERNS = "patterns"
FORMATS = "formats of strings"
COUNTS = "numbers of items"

_MAX_US = 10**9
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_TENTHS_US, _FRACTIONS_US = 5_500, 10_000
"""Minimum microseconds to compile a range of numbers with a bound that is not an integer.

The first constant is for bounds with at most one decimal, the second for other bounds.
"""
_FORMATS_US = {"ipv6": 31_000, "email": 14_000, "uri": 13_000, "hostname": 5_000, "uuid": 2_000}
"""Microseconds to compile each string with this format, in addition to `Costs.format_us`."""
_SMALL_RANGES_US = (100, 300, 500, 900, 1_600, 3_200)
"""Microseconds to compile a range of numbers, by the number of digits of its larger bound."""


def costs_of(schema: Any, costs: Costs) -> Counter[str]:
    """Return the microseconds to compile a schema from `rewrite`, by feature of the schema."""
    found: Counter[str] = Counter()
    references: Counter[str] = Counter()
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        found[SCHEMAS] += int(costs.schema)
        if isinstance(each, dict):
            waiting += _add(each, costs, found)
            references[each.get("$ref", "")] += "$ref" in each
    found[REFERENCES] += int(sum([count**2 for count in references.values()]) * costs.reference)
    return found


def _add(schema: dict[str, Any], costs: Costs, found: Counter[str]) -> list[Any]:
    """Add the costs of a schema without its subschemas to `found`. Return the subschemas."""
    if "enum" in schema or "const" in schema:
        text = json.dumps(schema.get("enum", schema.get("const")), ensure_ascii=False)
        found[NAMES] += int(len(text.encode()) * costs.character)
    found[RANGES] += int(min(range_cost(schema, costs), _MAX_US))
    found[COUNTS] += int(min(count_cost(schema, costs), _MAX_US))
    found[LENGTHS] += int(min(length_cost(schema, costs), _MAX_US))
    found[PATTERNS] += int(min(pattern_cost(schema.get("pattern"), costs), _MAX_US))
    found[FORMATS] += int(format_cost(schema, costs))
    parts = [*schema.get("anyOf", ()), *schema.get("prefixItems", ())]
    parts += [schema[name] for name in ("items", "additionalProperties") if name in schema]
    for name, each in schema.get("patternProperties", {}).items():
        found[PATTERNS] += int(min(pattern_cost(name, costs), _MAX_US))
        parts.append(each)
    properties = schema.get("properties", {})
    for name, each in properties.items():
        found[NAMES] += int(len(name.encode()) * costs.character)
        parts.append(each)
    optional = len(properties) - len(schema.get("required", ()))
    found[OPTIONAL] += int(max(optional, 0) ** 2 * costs.optional)
    found[OPEN] += int(open_cost(schema, costs))
    return [*parts, *schema.get("$defs", {}).values()]


def open_cost(schema: dict[str, Any], costs: Costs) -> float:
    """Return the microseconds to compile the names of an object's additional properties.

    Return 0 if the schema does not allow additional properties. Their names may be any text except
    the names in `properties`, and excluding these names takes time.
    """
    if schema.get("additionalProperties", False) is False:
        return 0
    found, before = 2, ""
    for name in sorted(schema.get("properties", {})):
        pairs = enumerate(zip(name, before, strict=False))
        shared = next((at for at, (one, other) in pairs if one != other), len(before))
        found += len(name) - shared
        before = name
    return found * costs.open_character


def range_cost(schema: dict[str, Any], costs: Costs) -> float:
    """Return the microseconds to compile minimum, maximum and the exclusive bounds of a schema."""
    lower = [schema[name] for name in _LOWER if name in schema]
    upper = [schema[name] for name in _UPPER if name in schema]
    if not lower and not upper:
        return 0
    whole = schema.get("type") == "integer"
    bounds = lower + upper
    least = 0
    if whole or all(bound == int(bound) for bound in bounds):
        factor = 1.0 if whole else 1.4
    else:
        factor = 3.5
        has_tenths = all(round(bound, 1) == bound for bound in bounds)
        least = _TENTHS_US if has_tenths else _FRACTIONS_US
    # A range with negative and positive numbers is compiled as two ranges, below and above 0.
    is_both = (not lower or lower[0] < 0) and (not upper or upper[0] > 0)
    digits = [_digits(bound) for bound in bounds]
    found = sum(map(_digits_cost, digits)) if is_both else _digits_cost(max(digits))
    return max(found * factor, least) * costs.digits


def _digits(bound: float) -> int:
    """Return the number of digits of a bound if written without an exponent, at most 400."""
    _, digits, exponent = Decimal(repr(bound)).as_tuple()
    assert isinstance(exponent, int)
    return min(max(len(digits), len(digits) + exponent, -exponent), 400)


def _digits_cost(digits: int) -> float:
    if digits < len(_SMALL_RANGES_US):
        return _SMALL_RANGES_US[digits]
    return 2_000 * digits - 5_000


def length_cost(schema: dict[str, Any], costs: Costs) -> float:
    """Return the microseconds to compile minLength and maxLength of a schema."""
    # Limit both lengths. A client's integer may be too large to be converted to a float.
    least, most = min(int(schema.get("minLength", 0)), _MAX_US), schema.get("maxLength")
    if most is not None and costs.length_form != "keywords":
        return lengths.pattern_cost(least, int(most), costs.length_form)
    characters = 0.6 * least if most is None else min(most, _MAX_US)
    return float(min(characters * costs.length, costs.max_length))


def format_cost(schema: dict[str, Any], costs: Costs) -> float:
    """Return the microseconds to compile the `format` of a schema; 0 without a format."""
    if "format" not in schema:
        return 0
    return _FORMATS_US.get(schema["format"], 0) * costs.format_factor + costs.format_us


def count_cost(schema: dict[str, Any], costs: Costs) -> float:
    """Return the microseconds to compile minItems and maxItems of a schema."""
    count = max(schema.get("minItems", 0), schema.get("maxItems", 0))
    return float(min(count * costs.item, costs.max_items))


@lru_cache(maxsize=256)
def pattern_cost(pattern: str | None, costs: Costs) -> float:
    """Return the microseconds to compile a regular expression; 0 if `pattern` is None."""
    return 0 if pattern is None else automaton.cost_of(parts_of(pattern), costs)
