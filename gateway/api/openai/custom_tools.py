"""Conversion between custom tools and functions.

A custom tool is called with plain text, not with JSON arguments. So the model is offered a function
with one string parameter instead.
"""

from __future__ import annotations

from typing import Any

import orjson
from pydantic_core import from_json

_INPUT = "input"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}
"""JSON schema of the arguments of each function that replaces a custom tool."""


def describe(description: str | None, syntax: str | None, grammar: str | None) -> str | None:
    """Return the description of the function that replaces a custom tool.

    The result consists of the tool's description and grammar. Return None if the tool has neither.
    """
    texts = [description] if description else []
    if grammar is not None:
        texts.append(f"The {_INPUT} must match this grammar ({syntax}):\n{grammar}")
    return "\n\n".join(texts) or None


def input_to_arguments(text: str) -> str:
    """Return the arguments of the replacing function, as JSON text, for a custom tool's input."""
    return orjson.dumps({_INPUT: text}).decode()


def arguments_to_input(arguments: str) -> str:
    """Return a custom tool's input, from the JSON arguments of the replacing function.

    If the JSON text is truncated, return the beginning of the input. Some models write the plain
    input instead of JSON arguments. Return such a text unchanged.
    """
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    value = found.get(_INPUT) if isinstance(found, dict) else None
    if isinstance(value, str):
        return value
    return "" if found == {} else arguments
