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
"""The JSON schema of the function's arguments, the same for all custom tools."""


def describe(description: str | None, syntax: str | None, grammar: str | None) -> str | None:
    """Return the function's description: the tool's description, followed by the tool's grammar.

    A tool may lack the description or the grammar. Return None if it lacks both.
    """
    texts = [description] if description else []
    if grammar is not None:
        texts.append(f"The {_INPUT} must match this grammar ({syntax}):\n{grammar}")
    return "\n\n".join(texts) or None


def input_to_arguments(text: str) -> str:
    """Return the function's arguments, as JSON text, for an input of the custom tool."""
    return orjson.dumps({_INPUT: text}).decode()


def arguments_to_input(arguments: str) -> str:
    """Return the custom tool's input, from the function's arguments as JSON text.

    For truncated arguments, return the beginning of the input. Some models write the input itself
    instead of JSON arguments: return such a text unchanged.
    """
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    value = found.get(_INPUT) if isinstance(found, dict) else None
    if isinstance(value, str):
        return value
    return "" if found == {} else arguments
