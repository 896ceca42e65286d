"""Keywords of JSON schema: allowed values, the types they restrict, and unsupported keywords."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from guides.kinds import Backend

TYPES = ("object", "array", "string", "number", "boolean", "null")
"""The types of JSON values. Each value has exactly one type; an integer is a number."""
ABOUT: Mapping[str, frozenset[str]] = {
    "object": frozenset(
        {
            *("properties", "required", "additionalProperties", "patternProperties"),
            *("propertyNames", "minProperties", "maxProperties", "dependentRequired"),
            *("dependencies", "unevaluatedProperties"),
        }
    ),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems", "unevaluatedItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
}
"""Keywords that restrict values of a type, by the type. They do not affect other types."""
FORMATS = frozenset(
    {
        *("date", "date-time", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "time", "uri", "uuid"),
    }
)
"""Formats that xgrammar and llguidance enforce. In the standard, `format` is only an annotation."""

_NO_COMPILER = frozenset(
    {
        *("not", "if", "contains", "dependentSchemas"),
        *("$dynamicRef", "$recursiveRef"),
    }
)
_HOLDERS = frozenset(
    {
        *("$defs", "definitions", "properties", "patternProperties"),
        *("allOf", "anyOf", "oneOf", "prefixItems"),
    }
)
_MAX_SHOWN = 300
_ONE = frozenset({"items", "additionalProperties", "additionalItems", "propertyNames"})
_NAME = re.compile(r"[A-Za-z_$][\w$-]*", re.ASCII)


def step(path: str, *keys: str | int) -> str:
    """Return the JSON path of the value that is at `keys` below `path`."""
    for key in keys:
        if isinstance(key, str) and _NAME.fullmatch(key):
            path += f".{key}"
        else:
            path += f"[{key!r}]"
    return path


def refuse(path: str, what: str) -> NoReturn:
    shown = path if len(path) <= _MAX_SHOWN else f"{path[:_MAX_SHOWN]}..."
    raise ValueError(f"{shown}: {what}")


def subschemas(schema: Any) -> Iterator[tuple[list[str | int], Any]]:
    """Yield each direct subschema of a schema as a pair (keys, subschema).

    The keys lead from the schema to the subschema. Malformed subschemas are skipped.
    """
    for keyword, value in schema.items() if isinstance(schema, dict) else ():
        if isinstance(value, list) and (keyword in _HOLDERS or keyword == "items"):
            yield from (([keyword, index], part) for index, part in enumerate(value))
        elif isinstance(value, dict) and keyword in _HOLDERS:
            yield from (([keyword, name], part) for name, part in value.items())
        elif isinstance(value, dict) and keyword in _ONE:
            yield [keyword], value


def pointer(keys: list[str | int]) -> str:
    """Return the `$ref` to the value at `keys` below the document's root."""
    parts = [str(key).replace("~", "~0").replace("/", "~1").replace("%", "%25") for key in keys]
    return "/".join(["#", *parts])


def inspect(schema: Mapping[str, Any], path: str) -> None:
    """Raise ValueError if a keyword of the schema at `path` has an invalid value."""
    for keyword, value in schema.items():
        if (expected := _EXPECTED.get(keyword)) is not None and not expected[0](value):
            found = f"found {_shown(value)}" if _is_short(value) else "found something else"
            refuse(path, f"{keyword}: {found}; allowed: {expected[1]}")


def unsupported(schema: Mapping[str, Any], backend: Backend) -> Iterator[tuple[str, str]]:
    """Yield (keyword, reason) for each keyword in a schema that `backend` does not enforce."""
    for keyword, value in schema.items():
        if (
            keyword in _NO_COMPILER
            or (keyword == "uniqueItems" and value)
            or (keyword == "multipleOf" and backend == "xgrammar")
            or (keyword.startswith("unevaluated") and isinstance(value, dict))
        ):
            yield keyword, f"{keyword} is not supported"
        elif keyword == "$ref" and value != "#" and not value.startswith("#/"):
            allowed = "#/ and the path in the schema"
            yield keyword, f"$ref: {value} cannot be followed; allowed: {allowed}"


def _shown(value: Any) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, repr(value))


def _is_short(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float)
        or (isinstance(value, str) and len(value) < 40)
    )


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_schema, value.values()))


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_type(value: Any) -> bool:
    known = {*TYPES, "integer"}
    if isinstance(value, list):
        return bool(value) and all(isinstance(each, str) and each in known for each in value)
    return isinstance(value, str) and value in known


def _are_needs(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_names, value.values()))


_SCHEMA = (_is_schema, "a schema")
_MAP = (_is_map, "schemas by name")
_LIST = (lambda value: bool(value) and _is_list(value), "a list of schemas")
_NUMBER = (_is_number, "a number")
_COUNT = (_is_count, "an integer from 0 on")
_STRING = (lambda value: isinstance(value, str), "a string")
_NAMES = (_is_names, "a list of names")
_EXPECTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, f"{', '.join((*TYPES, 'integer'))}, or a list of these"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of values"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _LIST),
    **dict.fromkeys(("properties", "patternProperties"), _MAP),
    **dict.fromkeys(("additionalProperties", "additionalItems", "propertyNames"), _SCHEMA),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), _SCHEMA),
    "items": (lambda value: _is_schema(value) or _is_list(value), "a schema"),
    **dict.fromkeys(("minItems", "maxItems", "minLength", "maxLength"), _COUNT),
    **dict.fromkeys(("minProperties", "maxProperties"), _COUNT),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _NUMBER),
    "multipleOf": (lambda value: _is_number(value) and value > 0, "a number above 0"),
    **dict.fromkeys(("pattern", "format", "$ref"), _STRING),
    "required": _NAMES,
    "dependentRequired": (_are_needs, "lists of names by name"),
    "dependencies": (_are_needs, "lists of names by name"),
    "uniqueItems": (lambda value: isinstance(value, bool), "true or false"),
}
