"""What a request says its answer must match, as one guide for the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from gateway.api.messages import ResponseFormat, StructuredOutputs, Tool
from gateway.api.strict_json import load
from gateway.errors import InvalidRequest
from gateway.generation import Guide
from gateway.parsers.tools.forced import ForcedCall, named_guide, required_guide

# The guide type `json` alone would allow an array as well.
_OBJECT = Guide("json_schema", '{"type":"object"}')
# Keywords that hold schemas by name, in a list, or one.
_MAPS = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_LISTS = frozenset({"anyOf", "oneOf", "prefixItems"})
_SCHEMAS = frozenset({"additionalProperties", "contains", "items"})
# Keywords under which several schemas hold for one object.
_COMBINERS = frozenset(
    {"allOf", "dependentSchemas", "else", "if", "not", "then", "unevaluatedProperties"}
)
# Keywords by which an object says itself what else it may hold.
_OPENERS = frozenset(
    {"$ref", "additionalProperties", "anyOf", "oneOf", "patternProperties", "propertyNames"}
)


def format_guide(wanted: ResponseFormat) -> Guide | None:
    """`response_format` of OpenAI; None for plain text."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _OBJECT
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequest(
            "response_format.json_schema.schema: must be given for type json_schema.",
            param="response_format",
        )
    return Guide("json_schema", _dump(closed(wanted.json_schema.schema_)))


def structured_guide(wanted: StructuredOutputs) -> Guide:
    """`structured_outputs` of vLLM."""
    given = [name for name, value in wanted if value is not None and value is not False]
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs: found {len(given)} constraints; allowed: exactly one.",
            param="structured_outputs",
        )
    if wanted.regex is not None:
        return Guide("regex", wanted.regex)
    if wanted.grammar is not None:
        return Guide("ebnf_grammar", wanted.grammar)
    if wanted.choice is not None:
        # A JSON string is a string of the grammar's as well.
        branches = " | ".join(_dump(choice) for choice in wanted.choice)
        return Guide("ebnf_grammar", f"root ::= {branches}")
    if wanted.json_ is not None:
        schema = wanted.json_
        if isinstance(schema, str):
            schema = load(schema.encode(), "structured_outputs.json")
        return Guide("json_schema", _dump(closed(schema)))
    return _OBJECT


def tool_guide(tools: list[Tool], forced: ForcedCall, *, parallel: bool) -> Guide:
    """What an answer must match that is a call which must happen."""
    functions = {tool.function.name: closed(tool.function.parameters) for tool in tools}
    name = forced.name
    if name is None:
        return Guide("json_schema", required_guide(functions, parallel=parallel))
    if name not in functions:
        known = ", ".join(functions)
        raise InvalidRequest(f"tool_choice: found {name!r}, allowed: {known}.", param="tool_choice")
    return Guide("json_schema", named_guide(functions[name]))


def guides_of_tools(tools: list[Tool], forced: ForcedCall) -> Iterator[tuple[int, Guide]]:
    """What `tool_guide` is made of, by the tools' places: what the arguments of each must match."""
    for index, tool in enumerate(tools):
        if forced.name in (None, tool.function.name):
            yield index, Guide("json_schema", named_guide(closed(tool.function.parameters)))


def closed(schema: Any) -> Any:
    """The schema with objects that name properties closed to others, where it does not say.

    So xgrammar reads schemas, TensorRT-LLM's backend; a model that is free to invent properties
    may do so without end. What is generated meets the schema as given, too. Schemas whose parts
    hold together for one object are left alone: closing a part would forbid the others' properties.
    """
    return schema if _combines(schema) else _closed(schema)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    narrowed = {key: _mapped(key, value, _closed) for key, value in schema.items()}
    properties = schema.get("properties")
    if (
        isinstance(properties, dict)
        and not schema.keys() & _OPENERS
        and _are_required(schema.get("required", []), properties)
    ):
        narrowed["additionalProperties"] = False
    return narrowed


def _are_required(names: Any, properties: dict[str, Any]) -> bool:
    """Whether these are the names of properties; what else they may be, the compiler refuses."""
    return isinstance(names, list) and all(
        isinstance(name, str) and (not name or name in properties) for name in names
    )


def _combines(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    found = bool(schema.keys() & _COMBINERS)

    def note(part: Any) -> Any:
        nonlocal found
        found = found or _combines(part)
        return part

    for key, value in schema.items():
        _mapped(key, value, note)
    return found


def _mapped(keyword: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value of a keyword with the schemas in it changed; data and names are no schemas."""
    if keyword in _MAPS and isinstance(value, dict):
        return {name: change(part) for name, part in value.items()}
    if keyword in _LISTS and isinstance(value, list):
        return [change(part) for part in value]
    return change(value) if keyword in _SCHEMAS else value


def _dump(value: Any) -> str:
    return orjson.dumps(value).decode()
