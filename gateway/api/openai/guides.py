"""Guides (constraints for guided decoding), built from response formats and tools.

See decision 016 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import orjson

from gateway.api.openai.chat_tools import Tool
from gateway.api.openai.formats import ResponseFormat, StructuredOutputs
from gateway.api.strict_json import load
from gateway.api.validation import list_names, show_value
from gateway.errors import InvalidRequest
from gateway.generation.options import Guide
from gateway.parsers.tools.either import either_schema
from gateway.parsers.tools.forced import ForcedCall, arguments_guide, calls_guide

# Schema for a request that wants a JSON object but sends no schema. The engine's guide type `json`
# is not used, because it would also allow an array.
_OBJECT: dict[str, Any] = {"type": "object"}


BestEffortPaths = tuple[tuple[str, str], ...]
"""Paths of the JSON schemas in a guide that the engine need not enforce completely.

There is a pair for each schema: its JSON path in the guide, and its path in the client's request.
If the engine cannot enforce a keyword of the schema, the keyword is removed from the guide. See
`Guide.best_effort`.
"""
DescribePath = Callable[[str], str]
"""Function that converts a parameter path of a chat request to the path in the client's protocol.

Error messages contain the converted path.
"""


def get_format_schema(wanted: ResponseFormat) -> dict[str, Any] | None:
    """Return the JSON schema of a `response_format`; None for formats that are not JSON.

    Raise InvalidRequest if a format of type `json_schema` has no schema or two schemas.
    """
    if wanted.type in ("json_object", "json"):
        return wanted.schema_ or _OBJECT
    if wanted.type != "json_schema":
        return None
    schema = wanted.schema_ if wanted.json_schema is None else wanted.json_schema.schema_
    if schema is None or (wanted.schema_ is not None and wanted.json_schema is not None):
        raise InvalidRequest(
            "response_format.json_schema.schema: must be given once for type json_schema.",
            param="response_format.json_schema.schema",
        )
    return schema


def build_format_guide(wanted: ResponseFormat, describe_path: DescribePath) -> Guide | None:
    """Build the guide that enforces a `response_format`; None if the answer may be any text."""
    if wanted.is_plain:
        return None
    schema = get_format_schema(wanted)
    if schema is not None:
        return Guide("json_schema", _dump(schema), _find_format_paths(wanted, "$", describe_path))
    field = "regex" if wanted.type == "regex" else "grammar"
    text: str | None = getattr(wanted, field)
    if text is None:
        raise InvalidRequest(
            f"response_format.{field}: must be given for type {wanted.type}.",
            param=f"response_format.{field}",
        )
    return Guide("regex" if wanted.type == "regex" else "ebnf_grammar", text)


def _find_format_paths(
    wanted: ResponseFormat, path: str, describe_path: DescribePath
) -> BestEffortPaths:
    """Return the value of `Guide.best_effort` for the schema of a response format.

    `path` is the JSON path of the schema in the guide. Return () if the format is strict: the
    engine must then enforce every keyword.
    """
    given = wanted.json_schema
    if (wanted if given is None else given).strict:
        return ()
    name = "response_format.schema" if given is None else "response_format.json_schema.schema"
    return ((path, describe_path(name)),)


def build_structured_guide(wanted: StructuredOutputs) -> Guide:
    """Build the guide that enforces vLLM's `structured_outputs`.

    Raise InvalidRequest if not exactly one constraint is set, or if the JSON text of a schema is
    invalid.
    """
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
        # Write each choice as a JSON string, which is also a valid string in an EBNF grammar.
        branches = " | ".join(_dump(choice) for choice in wanted.choice)
        return Guide("ebnf_grammar", f"root ::= {branches}")
    if wanted.json_ is not None:
        schema = wanted.json_
        if isinstance(schema, str):
            schema = load(schema.encode(), "structured_outputs.json")
        return Guide("json_schema", _dump(schema))
    return Guide("json_schema", _dump(_OBJECT))


def build_either_guide(
    wanted: ResponseFormat,
    tools: list[Tool],
    *,
    parallel: bool,
    describe_path: DescribePath,
    strict_alone: bool = False,
) -> Guide:
    """Build the guide for an answer that is either tool calls or text in the response format.

    Args:
        wanted: the response format.
        tools: the tools that may be called.
        parallel: allow several calls.
        describe_path: converts paths to the client's protocol, for errors.
        strict_alone: enforce the argument schemas of `strict` tools only.
    """
    functions = {tool.function.name: tool.function.parameters for tool in tools}
    enforced = {
        tool.function.name: None for tool in tools if tool.function.strict or not strict_alone
    }
    schema = get_format_schema(wanted) or {}
    paths = _find_format_paths(wanted, "$.$defs.answer", describe_path) + _find_tool_paths(
        tools, enforced, describe_path
    )
    text = either_schema(schema, functions, enforced, parallel=parallel)
    return Guide("json_schema", text, paths)


def build_tool_guide(
    tools: list[Tool], forced: ForcedCall, *, parallel: bool, describe_path: DescribePath
) -> Guide:
    """Build the guide for an answer that must be a tool call.

    Raise InvalidRequest if the forced tool is not in `tools` or a schema is nested too deep.
    """
    functions = {tool.function.name: tool.function.parameters for tool in tools}
    name = forced.name
    if name is not None:
        if name not in functions:
            raise InvalidRequest(
                f"tool_choice: found {show_value(name)}, not the name of a tool; "
                f"allowed: {list_names(functions)}.",
                param="tool_choice",
            )
        functions, parallel = {name: functions[name]}, False
    text = calls_guide(functions, parallel=parallel)
    return Guide("json_schema", text, _find_tool_paths(tools, functions, describe_path))


def _find_tool_paths(
    tools: list[Tool], enforced: Iterable[str], describe_path: DescribePath
) -> BestEffortPaths:
    """Return the value of `Guide.best_effort` for the argument schemas of tools.

    `enforced` has the names of the tools whose schemas are in the guide. Schemas of strict tools
    are left out of the result: the engine must enforce all of their keywords.
    """
    last = {tool.function.name: index for index, tool in enumerate(tools)}
    return tuple(
        [
            (f"$.$defs.arguments{index}", describe_path(f"tools[{last[name]}].function.parameters"))
            for index, name in enumerate(enforced)
            if not tools[last[name]].function.strict
        ]
    )


def build_argument_guides(tools: list[Tool], forced: ForcedCall) -> Iterator[tuple[int, Guide]]:
    """Yield (tool index, guide for the tool's arguments) for each tool that may be called."""
    for index, tool in enumerate(tools):
        if forced.name in (None, tool.function.name):
            # This guide is only compiled to find the tool whose schema is invalid. Keywords that
            # are not enforced are not reported for this guide. So the schema's path in the client's
            # request is not needed: leave it empty.
            paths = () if tool.function.strict else (("$", ""),)
            yield index, Guide("json_schema", arguments_guide(tool.function.parameters), paths)


def build_strict_argument_guides(tools: list[Tool]) -> Iterator[tuple[int, Guide]]:
    """Yield (tool index, guide for the tool's arguments) for each strict tool."""
    for index, tool in enumerate(tools):
        if tool.function.strict:
            yield index, Guide("json_schema", arguments_guide(tool.function.parameters))


def _dump(value: Any) -> str:
    return orjson.dumps(value).decode()
