"""Tools that a provider runs, or that a provider's models know without a schema.

This server does not run such tools or describe them to the model. The prompt omits them, and
`x-ignored-parameters` names them. Only a tool choice that demands a call of one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.api.validation import show_value
from gateway.errors import UnsupportedParameter

# Hints are held in memory during the answer; `ignored` limits the header.
_MAX_TYPES = 64
_MAX_TYPE_CHARS = 64
_MAX_MISSPELLED_CHARS = 16


class HostedTool(NamedTuple):
    """A tool's `type`, and the path of that field in the request."""

    param: str
    type: str


def find_meant_type(kind: str) -> str | None:
    """Return `function` or `custom` if the letters of `kind` differ from it by at most one.

    A misspelled type of the client's own tool would otherwise be left out like a hosted tool.
    """
    if len(kind) > _MAX_MISSPELLED_CHARS:
        return None
    letters = set(kind.lower())
    return next((each for each in ("function", "custom") if len(letters ^ set(each)) <= 1), None)


def name_hosted(hosted: Sequence[HostedTool]) -> list[str]:
    """Return a hint for the first tool of each type, of 64 types at most."""
    first: dict[str, str] = {}
    for param, kind in hosted:
        first.setdefault(kind, param)
    named = [*first.items()][:_MAX_TYPES]
    return [f"{param}={kind[:_MAX_TYPE_CHARS]}" for kind, param in named]


def refuse_hosted(hosted: Sequence[HostedTool]) -> None:
    """Raise UnsupportedParameter if a demanded call could only use these hosted tools."""
    if hosted:
        param, kind = hosted[0]
        raise UnsupportedParameter(
            f"{param}: {show_value(kind)} is a tool that this server does not run, and "
            "tool_choice demands a call; add a tool that the client runs, or change tool_choice.",
            param=param,
        )
