"""What a request says its answer must match, as one guide for the engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from gateway.api.chat_tools import Tool
from gateway.api.messages import ResponseFormat, StructuredOutputs
from gateway.api.strict_json import load
from gateway.errors import InvalidRequest
from gateway.generation import Guide
from gateway.parsers.tools.either import either_schema
from gateway.parsers.tools.forced import ForcedCall, arguments_guide, calls_guide

# The guide type `json` alone would allow an array as well.
_OBJECT: dict[str, Any] = {"type": "object"}


def format_schema(wanted: ResponseFormat) -> dict[str, Any] | None:
    """`response_format` of OpenAI, as a JSON schema; None for plain text."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return wanted.schema_ or _OBJECT
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequest(
            "response_format.json_schema.schema: must be given for type json_schema.",
            param="response_format",
        )
    return wanted.json_schema.schema_


def format_guide(wanted: ResponseFormat) -> Guide | None:
    """The same as a guide."""
    schema = format_schema(wanted)
    return None if schema is None else Guide("json_schema", _dump(schema))


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
        return Guide("json_schema", _dump(schema))
    return Guide("json_schema", _dump(_OBJECT))


def either_guide(
    wanted: ResponseFormat, tools: list[Tool], *, parallel: bool, strict_alone: bool = False
) -> Guide:
    """What an answer must match that is calls or in the format.

    `strict_alone` leaves the arguments of tools that are not strict to the model; so does a schema
    of theirs that cannot be part of a guide. Raises InvalidRequest for any other.
    """
    functions = {tool.function.name: tool.function.parameters for tool in tools}
    held = {tool.function.name: None for tool in tools if tool.function.strict or not strict_alone}
    schema = format_schema(wanted) or {}
    try:
        return Guide("json_schema", either_schema(schema, functions, held, parallel=parallel))
    except InvalidRequest:
        if strict_alone:
            raise
        return either_guide(wanted, tools, parallel=parallel, strict_alone=True)


def tool_guide(tools: list[Tool], forced: ForcedCall, *, parallel: bool) -> Guide:
    """What an answer must match that is a call which must happen."""
    functions = {tool.function.name: tool.function.parameters for tool in tools}
    name = forced.name
    if name is not None:
        if name not in functions:
            known = ", ".join(functions)
            raise InvalidRequest(
                f"tool_choice: found {name!r}, allowed: {known}.", param="tool_choice"
            )
        functions, parallel = {name: functions[name]}, False
    return Guide("json_schema", calls_guide(functions, parallel=parallel))


def guides_of_tools(tools: list[Tool], forced: ForcedCall) -> Iterator[tuple[int, Guide]]:
    """What `tool_guide` is made of, by the tools' places: what the arguments of each must match."""
    for index, tool in enumerate(tools):
        if forced.name in (None, tool.function.name):
            yield index, Guide("json_schema", arguments_guide(tool.function.parameters))


def guides_of_strict_tools(tools: list[Tool]) -> Iterator[tuple[int, Guide]]:
    """The same of `either_guide`."""
    for index, tool in enumerate(tools):
        if tool.function.strict:
            yield index, Guide("json_schema", arguments_guide(tool.function.parameters))


def _dump(value: Any) -> str:
    return orjson.dumps(value).decode()
