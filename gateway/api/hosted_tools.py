"""Tools that a provider runs, or that a provider's models know without a schema.

This server does not run such tools or describe them to the model. The prompt omits them, and
`x-ignored-parameters` names them. Only a tool choice that demands a call of such a tool is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.api.validation import show_value
from gateway.errors import UnsupportedParameter

# Limits of the hints, which are in memory during the answer. `ignored` limits the header.
_MAX_TYPES = 64
_MAX_TYPE_CHARS = 64
_MAX_MISSPELLED_CHARS = 16


class HostedTool(NamedTuple):
    """A hosted tool in a request: its `type`, and the path of that field as `param`."""

    param: str
    type: str


def find_meant_type(kind: str) -> str | None:
    """Return the type, `function` or `custom`, that `kind` seems to misspell; None for neither.

    The set of letters may differ by one letter. Without this check, a client's own tool with a
    misspelled type would be left out like a hosted tool.
    """
    if len(kind) > _MAX_MISSPELLED_CHARS:
        return None
    letters = set(kind.lower())
    return next((each for each in ("function", "custom") if len(letters ^ set(each)) <= 1), None)


def name_hosted(hosted: Sequence[HostedTool]) -> list[str]:
    """Return a hint, `param=type`, for the first tool of each type; for 64 types at most."""
    first: dict[str, str] = {}
    for param, kind in hosted:
        first.setdefault(kind, param)
    named = [*first.items()][:_MAX_TYPES]
    return [f"{param}={kind[:_MAX_TYPE_CHARS]}" for kind, param in named]


def refuse_hosted(hosted: Sequence[HostedTool]) -> None:
    """Raise UnsupportedParameter unless `hosted` is empty.

    Use this if the tool choice demands a call that only these hosted tools could serve.
    """
    if hosted:
        param, kind = hosted[0]
        raise UnsupportedParameter(
            f"{param}: {show_value(kind)} is a tool that this server does not run, and "
            "tool_choice demands a call; add a tool that the client runs, or change tool_choice.",
            param=param,
        )
