"""Tools that a provider runs, or that models of one provider know without a schema.

Nothing here runs such a tool or describes it to the model, so it is left out of the prompt and
named in `x-ignored-parameters`. Only a choice that demands a call of one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from gateway.errors import UnsupportedParameter

# A response header holds the names.
_MAX_NAMED = 8
_PLAIN = re.compile(r"[a-z0-9_.-]{1,64}")


class HostedTool(NamedTuple):
    """A tool's `type`, and the path of that field in the request."""

    param: str
    type: str


def name_hosted(hosted: Sequence[HostedTool]) -> list[str]:
    """Return a hint for the first tool of each type, and one for the number of further types."""
    first: dict[str, str] = {}
    for param, kind in hosted:
        first.setdefault(kind, param)
    hints = [
        f"{param}={kind}" if _PLAIN.fullmatch(kind) else param
        for kind, param in [*first.items()][:_MAX_NAMED]
    ]
    if len(first) > _MAX_NAMED:
        hints.append(f"tools: {len(first) - _MAX_NAMED} more types")
    return hints


def refuse_hosted(hosted: Sequence[HostedTool]) -> None:
    """Raise UnsupportedParameter if there are tools, none of which can be called."""
    if hosted:
        param, kind = hosted[0]
        raise UnsupportedParameter(
            f"{param}: {kind!r} is a tool that this server does not run, and tool_choice demands "
            "a call; add a tool that the client runs, or change tool_choice.",
            param=param,
        )
