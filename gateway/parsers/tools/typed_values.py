"""Conversion of the text of a tool call's argument to JSON, by the types that a schema allows.

The text is written between tags. The rules are those of vLLM's parsers:

- If the schema allows only strings, the value is a string with the unchanged text.
- Otherwise, valid JSON is used as it is. `True`, `False` and `None` are accepted, too. If the
  schema also allows strings, this rule applies only to JSON of another allowed type.
- If the schema allows an array or an object, Python lists and dictionaries are also accepted. Chat
  templates write the arguments of earlier calls in this way.
- Any other text becomes a string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from gateway.parsers.tools.literals import escape_json, read_value
from gateway.parsers.tools.parser import NotACall

STRING = frozenset({"string"})
_CONTAINERS = frozenset({"array", "object"})

# Maximum number of subschemas to examine. The same maximum applies to the number of `type` and
# `enum` entries to read. There are limits because this code runs on the event loop.
_MAX_ITEMS = 1000
# Maximum number of path components in a `$ref`; no request body is nested more deeply.
_MAX_REFERENCE_STEPS = 100
_PYTHON = {"True": "true", "False": "false", "None": "null"}
# Maximum length of text that is parsed as Python, which takes up to 12 ms on the event loop. Longer
# text becomes a string.
_MAX_LITERAL_CHARS = 16 * 1024
# Matches the text of a Python literal: strings, brackets, separators, constants and numbers. A text
# with other words is not a literal but an expression. No character is matched twice, so matching
# takes linear time.
_LITERAL = re.compile(
    r"(?:'(?:[^'\\]|\\.)*+'"
    r'|"(?:[^"\\]|\\.)*+"'
    r"|[\s\[\]{}(),:]"
    r"|(?<![\w.])(?:True|False|None|[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.]))*+",
    re.DOTALL,
)
# Maps each Python type that orjson returns to the names of its types in a JSON schema.
_TYPES: Mapping[type, frozenset[str]] = {
    bool: frozenset({"boolean"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    str: STRING,
    list: frozenset({"array"}),
    dict: frozenset({"object"}),
    type(None): frozenset({"null"}),
}


def types_of(parameters: Mapping[str, Any] | None, name: str) -> frozenset[str]:
    """Return the JSON types that a schema allows for the parameter `name`.

    The result is empty if the types are unknown.
    """
    properties = (parameters or {}).get("properties")
    todo: list[Any] = [properties.get(name)] if isinstance(properties, Mapping) else []
    parts, values = _BoundedItems(), _BoundedItems()
    seen: set[int] = set()
    types: set[str] = set()
    while todo and len(seen) < _MAX_ITEMS:
        schema = todo.pop()
        if not isinstance(schema, Mapping) or id(schema) in seen:
            continue
        seen.add(id(schema))
        listed = schema.get("type")
        if listed is not None:
            types.update(each for each in values.of(listed) if isinstance(each, str))
            continue
        known = values.of(schema.get("enum", []))
        known += [schema["const"]] if "const" in schema else []
        types.update(*(_TYPES.get(type(value), frozenset()) for value in known))
        for keyword in ("anyOf", "oneOf", "allOf"):
            todo += parts.of(schema.get(keyword, []))
        todo.append(_resolve_reference(parameters, schema.get("$ref")))
    return frozenset(types)


def as_json(text: str, types: frozenset[str]) -> str:
    """Convert the text of an argument to JSON.

    `types` are the JSON types that the schema allows; an empty set allows all types.
    """
    source = text.strip()
    source = _PYTHON.get(source, source)
    try:
        kinds = _TYPES[type(orjson.loads(source))]
    except orjson.JSONDecodeError:
        kinds, source = frozenset(), _container(source) if types & _CONTAINERS else ""
        if source:
            kinds = _TYPES[dict if source[0] == "{" else list]
        if not kinds & types:
            return f'"{escape_json(text)}"'
    # If the schema allows strings, and the text is not JSON of another allowed type, return the
    # text as a string. Keep quotes in this string: templates write strings without quotes, so the
    # model means the quotes as a part of the text.
    if "string" in types and (kinds == STRING or not kinds & types):
        return f'"{escape_json(text)}"'
    return source


def _container(source: str) -> str:
    """Return the JSON of a Python list, tuple or dictionary. Return "" for any other text."""
    if source[:1] not in ("[", "{", "(") or len(source) > _MAX_LITERAL_CHARS:
        return ""
    if not _LITERAL.fullmatch(source):
        return ""
    pieces: list[str] = []
    reading = read_value(source[0], "", pieces.append)
    try:
        next(reading)
        for char in source[1:] + "\0":
            reading.send(char)
    except NotACall:
        return ""
    except StopIteration as end:
        found = "".join(pieces)
        return found if end.value == "\0" and found[0] in "[{" else ""
    return ""


class _BoundedItems:
    """Limit of `_MAX_ITEMS` on the total number of items that are read from several lists."""

    def __init__(self) -> None:
        self._left = _MAX_ITEMS

    def of(self, value: Any) -> list[Any]:
        """Return the items of a list, at most as many as the limit still allows.

        A value that is not a list counts as one item.
        """
        found = (value if isinstance(value, list) else [value])[: self._left]
        self._left -= len(found)
        return found


def _resolve_reference(root: Any, reference: Any) -> Any:
    """Return the part of the schema `root` to which a `$ref` points; None if there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/", _MAX_REFERENCE_STEPS):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root
