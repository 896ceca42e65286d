"""Hosted tools: tools that OpenAI or Anthropic runs, or whose schema their models already know.

This server does not run such tools or describe them to the model. They are left out of the prompt
and named in the header `x-ignored-parameters`. A request is refused only if its tool choice demands
a call of such a tool.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gateway.api.validation import show_value
from gateway.errors import UnsupportedParameter

# Maximum number of names that `name_hosted` returns, and maximum characters of the tool type in a
# name. These limits save memory, because the names are needed until the response ends. The length
# of the header has another limit, in the module `ignored`.
_MAX_TYPES = 64
_MAX_TYPE_CHARS = 64
_MAX_MISSPELLED_CHARS = 16


class HostedTool(NamedTuple):
    """A hosted tool in a request: its `type`, and the path of the field `type` in the body."""

    param: str
    type: str


def find_meant_type(kind: str) -> str | None:
    """Return `function` or `custom` if `kind` looks like a misspelling of that type; else None.

    A misspelling has the same set of letters as the type, except for at most one letter. The order
    and the repetition of letters are ignored. Without this check, a client's own tool with a
    misspelled type would be left out like a hosted tool.
    """
    if len(kind) > _MAX_MISSPELLED_CHARS:
        return None
    letters = set(kind.lower())
    return next((each for each in ("function", "custom") if len(letters ^ set(each)) <= 1), None)


def name_hosted(hosted: Sequence[HostedTool]) -> list[str]:
    """Return names such as `tools[0].type=web_search` for the header `x-ignored-parameters`.

    There is one name for each type of tool, and at most 64 names.
    """
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
