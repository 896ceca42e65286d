"""Values that stand as text between tags, where only the function's schema knows their types.

The rules are those of vLLM's parsers of such forms: a string is the text as it stands; anything
else is JSON where it can be read as that, and a string where it cannot. `True`, `False` and `None`
are read, too, and so are Python lists and dictionaries where the schema asks for an array or an
object: templates write them into the prompt for the arguments of earlier calls.
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

# Parts of a schema that are looked at, and again values and types: this is between two tokens.
_MAX_ITEMS = 1000
# Steps of a reference: no body is nested deeper.
_MAX_REFERENCE_STEPS = 100
_PYTHON = {"True": "true", "False": "false", "None": "null"}
# Read as Python, text of that length takes up to 12 ms of the event loop; longer text is a string.
_MAX_LITERAL_CHARS = 16 * 1024
# Strings, and all else that a list or dictionary has; other words make it an expression. Nothing is
# matched twice, so the time is linear.
_LITERAL = re.compile(
    r"(?:'(?:[^'\\]|\\.)*+'"
    r'|"(?:[^"\\]|\\.)*+"'
    r"|[\s\[\]{}(),:]"
    r"|(?<![\w.])(?:True|False|None|[+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.]))*+",
    re.DOTALL,
)
# What JSON calls the values that orjson makes.
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
    """The JSON types that a function's schema allows for one parameter; none if it says nothing."""
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
    """The JSON of a value's text; without `types` it may be of any."""
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
    # Templates write strings without quotes.
    if "string" in types and (kinds == STRING or not kinds & types):
        return f'"{escape_json(text)}"'
    return source


def _container(source: str) -> str:
    """Return the JSON of a Python list, tuple or dictionary, "" if the text is none of them."""
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
    """The first of what lists hold, of all of them together `_MOST`."""

    def __init__(self) -> None:
        self._left = _MAX_ITEMS

    def of(self, value: Any) -> list[Any]:
        """What is listed; anything else is a list of one."""
        found = (value if isinstance(value, list) else [value])[: self._left]
        self._left -= len(found)
        return found


def _resolve_reference(root: Any, reference: Any) -> Any:
    """What a reference within the schema leads to, None if nothing."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    for part in reference[2:].split("/", _MAX_REFERENCE_STEPS):
        root = root.get(part) if isinstance(root, Mapping) else None
    return root
