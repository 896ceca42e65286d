"""Guides and parser for requests that force the model to call a tool.

In such a request, `tool_choice` is `required` or names a function. A guide is a JSON schema for
guided decoding. With the guides of this module, the complete output is a JSON list of
`{"name": ..., "arguments": {...}}`. This list replaces the model's own format of calls. If the
request names a function, the list has one call. A guide for the arguments alone would not work,
because models were trained to write a name first. With such a guide, 0 of 20 outputs of a test were
right. With a list of one call, all 20 were right.

JSON schemas are used because every engine with guided decoding supports them. A guide for calls
between tags would need a grammar for each model's format.

If the token limit cuts a call before its arguments start, the call is dropped. A call that is cut
later is reported. The module `either` handles outputs that may be an answer instead of calls.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.errors import InvalidRequest
from gateway.parsers.tools.events import Event
from gateway.parsers.tools.json_calls import JsonToolParser
from gateway.parsers.tools.parser import ToolParser

Schema = dict[str, Any]

_MAX_DEPTH = 100
# Some models never end a list of calls, and would continue until the context is full.
MAX_CALLS = 8
"""Maximum number of tool calls in a response with guided decoding."""
_ROOT = "#/$defs/arguments"
# _MAPS has keywords whose value maps names to schemas. _DATA has keywords whose value is data and
# not a schema.
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"const", "default", "enum", "examples"})
# Keywords with which a schema may define arguments even if it has no `properties`.
_COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf"})


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """Format of a response that must call the function `name`; None stands for any function."""

    name: str | None = None

    def parser(self) -> ToolParser:
        """Return a parser of outputs that match `calls_guide`."""
        return ForcedToolParser()


class ForcedToolParser(JsonToolParser):
    """Parser of outputs that match `calls_guide`."""

    def _run(self) -> Generator[None, str, None]:
        char = yield from self._gap((yield))
        if char == "[":
            self._undecided = True
            self._hold(char)
            char = yield from self._attempt(self._list((yield)))
        while True:
            char = yield from self._text(char, ())

    def finish(self, *, cut: bool = False) -> list[Event]:
        if self._undecided:
            self._drop()
        return super().finish(cut=cut)


def calls_guide(functions: Mapping[str, Schema | None], *, parallel: bool) -> str:
    """Return a guide for forced calls: the JSON schema of a list of calls, as text.

    If `parallel` is True, the list has 1 to `MAX_CALLS` calls. Otherwise, it has exactly one call.
    `functions` maps the name of each function that may be called to its `parameters` in the
    request. Raises InvalidRequest if a schema is nested too deep.
    """
    calls = [
        call_schema([name], {"$ref": f"{_ROOT}{index}"}) for index, name in enumerate(functions)
    ]
    schema = calls_schema(calls, parallel=parallel)
    # Copy each function's schema completely, with its own `$defs`, to its own path in the document.
    # Two functions may then use the same names in `$defs`. The references need only a new prefix.
    schema["$defs"] = {
        f"arguments{index}": move_arguments(name, parameters, f"{_ROOT}{index}")
        for index, (name, parameters) in enumerate(functions.items())
    }
    return orjson.dumps(schema).decode()


def call_schema(names: Sequence[str], arguments: Schema, key: str = "arguments") -> Schema:
    """Return the schema of a call to any of the functions `names`.

    `arguments` is the schema of the arguments. `key` is the property of the call that contains
    the arguments.
    """
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "enum": [*names]}, key: arguments},
        "required": ["name", key],
        "additionalProperties": False,
    }


def calls_schema(calls: Sequence[Schema], *, parallel: bool) -> Schema:
    most = MAX_CALLS if parallel else 1
    return {"type": "array", "minItems": 1, "items": {"anyOf": [*calls]}, "maxItems": most}


def arguments_guide(parameters: Schema | None) -> str:
    """Return the JSON schema of the arguments of a function with these `parameters`, as text."""
    return orjson.dumps(_arguments(parameters)).decode()


def move_arguments(function: str, parameters: Schema | None, root: str) -> Any:
    """Return the schema of a function's arguments, to be embedded in a larger schema.

    `root` is the JSON pointer of the embedded schema in the larger schema, such as
    `#/$defs/arguments0`. Raises InvalidRequest if the schema is nested too deep.
    """
    what = f"tools: the parameters of {function}"
    return move_references(_arguments(parameters), root, what, param="tools")


def _arguments(parameters: Schema | None) -> Schema:
    """Return the schema of a function's arguments, given its `parameters`.

    A function without `parameters` has no arguments, as in the OpenAI API.
    """
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.keys() & _COMPOSED:
        return parameters
    if "properties" in parameters:
        return {"type": "object"} | parameters
    # Allow any object. Without `additionalProperties`, xgrammar would allow only an empty object.
    return {"type": "object", "additionalProperties": True} | parameters


def move_references(schema: Any, root: str, what: str, *, param: str, depth: int = 0) -> Any:
    """Return a copy of a schema that can be embedded in another document.

    Each `$ref` to a part of the schema is changed, because its target moves. References to other
    documents are unchanged; the engine's schema compiler refuses them.

    Args:
        schema: the schema, or a part of the schema.
        root: JSON pointer of the embedded schema in the other document, such as `#/$defs/answer`.
        what: beginning of the error's message.
        param: the request parameter that the error names.
        depth: nesting depth of `schema` in the original schema.

    Raises InvalidRequest if the schema is nested too deep.
    """
    if depth > _MAX_DEPTH:
        raise InvalidRequest(f"{what} are nested more than {_MAX_DEPTH} levels deep.", param=param)

    if not isinstance(schema, list | dict):
        return schema

    def within(part: Any) -> Any:
        return move_references(part, root, what, param=param, depth=depth + 1)

    if isinstance(schema, list):
        return [within(item) for item in schema]
    copy: Schema = {}
    for keyword, value in schema.items():
        if keyword == "$ref" and isinstance(value, str) and (value + "/").startswith("#/"):
            copy[keyword] = root + value[1:]
        elif keyword in _MAPS and isinstance(value, dict):
            copy[keyword] = {name: within(part) for name, part in value.items()}
        elif keyword in _DATA:
            copy[keyword] = value
        # Omit `$id` and `$schema`: with an `$id`, references would be relative to that URI instead
        # of the document.
        elif keyword not in {"$id", "$schema"}:
            copy[keyword] = within(value)
    return copy
