"""What a request says its answer must match, as one guide for the engine."""

from __future__ import annotations

from typing import Any

import orjson

from gateway.api.messages import ResponseFormat, StructuredOutputs, Tool
from gateway.errors import InvalidRequest
from gateway.generation import Guide
from gateway.tools.forced import named_guide, required_guide


def format_guide(wanted: ResponseFormat) -> Guide | None:
    """`response_format` of OpenAI; None for plain text."""
    if wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Guide("json")
    if wanted.json_schema is None or wanted.json_schema.schema_ is None:
        raise InvalidRequest(
            "response_format.json_schema.schema: must be given for type json_schema.",
            param="response_format",
        )
    return Guide("json_schema", _dump(wanted.json_schema.schema_))


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
        text = wanted.json_ if isinstance(wanted.json_, str) else _dump(wanted.json_)
        return Guide("json_schema", text)
    return Guide("json")


def tool_guide(tools: list[Tool], name: str, *, parallel: bool) -> Guide:
    """A call that must happen: to the function `name`, or to any of them when it is empty."""
    functions = {tool.function.name: tool.function.parameters for tool in tools}
    if not name:
        return Guide("json_schema", required_guide(functions, parallel=parallel))
    if name not in functions:
        known = ", ".join(functions)
        raise InvalidRequest(f"tool_choice: found {name!r}, allowed: {known}.", param="tool_choice")
    return Guide("json_schema", named_guide(functions[name]))


def _dump(value: Any) -> str:
    return orjson.dumps(value).decode()
