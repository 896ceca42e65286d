"""Forced calls, `tool_choice` required or named: their guide, and its parser.

With guided decoding the complete output is bare JSON, whatever form the model was trained on: a
list of `{"name": ..., "arguments": {...}}`, with one call if the function is named. Models have
learned to write arguments after a name: from the arguments alone, 0 of 20 were right; from a list
of one, 20. A JSON schema expresses all of it, so every engine with guides supports this; the tags
of the forms would need a grammar for each.

A call that is cut by the output's limit is reported once its arguments have begun; the guide's JSON
is never content.

`either` does the same for outputs that may be an answer instead of calls.
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
# A model that does not know when to end a list of calls would continue to the end of its context.
MAX_CALLS = 8
"""Maximum number of calls in one answer if the guide is a list of calls."""
_ROOT = "#/$defs/arguments"
# Keywords whose value maps names to schemas, and those whose value is data.
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_DATA = frozenset({"const", "default", "enum", "examples"})
# A schema with one of these may define the arguments elsewhere.
_COMPOSED = frozenset({"$ref", "allOf", "anyOf", "oneOf"})


@dataclass(frozen=True, slots=True)
class ForcedCall:
    """A call that must be made: of the function `name`, or of any function if that is None."""

    name: str | None = None

    def parser(self) -> ToolParser:
        """Return a parser of what the guide of such a call allows."""
        return ForcedToolParser()


class ForcedToolParser(JsonToolParser):
    """Parser of what `calls_guide` allows."""

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
    """Return the JSON schema of one call, or one to eight if `parallel`, to any of the functions.

    `functions` maps names to `parameters`, as in requests. Raises InvalidRequest if a schema is
    nested too deep.
    """
    calls = [
        call_schema([name], {"$ref": f"{_ROOT}{index}"}) for index, name in enumerate(functions)
    ]
    schema = calls_schema(calls, parallel=parallel)
    # Each function's schema is copied completely, so its references only get a prefix, and the
    # names in its own `$defs` cannot clash with another's.
    schema["$defs"] = {
        f"arguments{index}": move_arguments(name, parameters, f"{_ROOT}{index}")
        for index, (name, parameters) in enumerate(functions.items())
    }
    return orjson.dumps(schema).decode()


def call_schema(names: Sequence[str], arguments: Schema, key: str = "arguments") -> Schema:
    """Return the schema of a call to any of these functions, with arguments of this schema."""
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
    """Return the JSON schema of the arguments of a function with these `parameters`."""
    return orjson.dumps(_arguments(parameters)).decode()


def move_arguments(function: str, parameters: Schema | None, root: str) -> Any:
    """Return the schema of the arguments, to be embedded in a document at `root`.

    Raises InvalidRequest if it is nested too deep.
    """
    what = f"tools: the parameters of {function}"
    return move_references(_arguments(parameters), root, what, param="tools")


def _arguments(parameters: Schema | None) -> Schema:
    """Return the schema of the arguments. At OpenAI a function without `parameters` has none."""
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.keys() & _COMPOSED:
        return parameters
    if "properties" in parameters:
        return {"type": "object"} | parameters
    # Any object; xgrammar takes it for an empty one without this keyword.
    return {"type": "object", "additionalProperties": True} | parameters


def move_references(schema: Any, root: str, what: str, *, param: str, depth: int = 0) -> Any:
    """Return a copy of a schema in which references to its root lead to `root`.

    References to other documents are unchanged, for the compiler to refuse. Raises InvalidRequest,
    which names `param` and begins with `what`, if the schema is nested too deep.
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
        # These would give the schema, and so its references, another base than the document.
        elif keyword not in {"$id", "$schema"}:
            copy[keyword] = within(value)
    return copy
