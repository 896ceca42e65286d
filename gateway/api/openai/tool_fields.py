"""Detection of unknown fields in tools, which may be typos of the client.

The pydantic models of tools ignore unknown fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from gateway.api.openai.messages import Lenient

Path = tuple[int | str, ...]

_NO_EFFECT = frozenset(
    {
        *("cache_control", "defer_loading", "eager_input_streaming", "input_examples"),
        "allowed_callers",
    }
)
"""Fields that clients are known to send and that affect neither the prompt nor the calls."""
_MAX_PATHS = 64


def find_unknown_fields(tools: Sequence[Lenient], given: Sequence[Any]) -> list[Path]:
    """Return the paths of unknown fields, at most 64.

    A field that is unknown in several items of a list is reported once, for the first item.

    Args:
        tools: the validated tools of the request.
        given: the same tools as JSON values, as the client sent them.
    """
    found: dict[Path, Path] = {}
    for path in _find_unknown_in_list(tools, given, ("tools",)):
        found.setdefault(tuple([part for part in path if isinstance(part, str)]), path)
        if len(found) == _MAX_PATHS:
            break
    return [*found.values()]


def _find_unknown_in_list(
    tools: Sequence[Lenient], given: Sequence[Any], path: Path
) -> Iterator[Path]:
    for number, (tool, written) in enumerate(zip(tools, given, strict=True)):
        yield from _find_unknown_in_tool(tool, written, (*path, number))


def _find_unknown_in_tool(tool: Lenient, given: dict[str, Any], path: Path) -> Iterator[Path]:
    if tool.takes_any_field:
        return
    fields = type(tool).__pydantic_fields__
    for name, value in given.items():
        if name not in fields:
            if name not in _NO_EFFECT and value is not None:
                yield (*path, name)
        elif type(value) is dict:
            member = getattr(tool, name)
            if type(member) is not dict:  # skip JSON schemas, whose names the client chooses
                yield from _find_unknown_in_tool(member, value, (*path, name))
        elif name == "tools":
            yield from _find_unknown_in_list(getattr(tool, name), value, (*path, name))
