"""Custom tools, whose argument is one text: functions with one string parameter to the model."""

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
"""The JSON schema of that function's arguments."""


def describe(description: str | None, syntax: str | None, grammar: str | None) -> str | None:
    """Return the function's description, which ends with the grammar if the tool has one."""
    texts = [description] if description else []
    if grammar is not None:
        texts.append(f"The {_INPUT} must match this grammar ({syntax}):\n{grammar}")
    return "\n\n".join(texts) or None


def input_to_arguments(text: str) -> str:
    """Return the function's arguments as JSON."""
    return orjson.dumps({_INPUT: text}).decode()


def arguments_to_input(arguments: str) -> str:
    """Return the tool's input, or its beginning if the call was cut.

    Some models write the input itself instead of arguments: that text is returned unchanged.
    """
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return arguments
    value = found.get(_INPUT) if isinstance(found, dict) else None
    if isinstance(value, str):
        return value
    return "" if found == {} else arguments
