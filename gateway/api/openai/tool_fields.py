"""Detection of unknown fields in tools, which may be misspelled."""

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
"""Known fields of clients that change neither the prompt nor the calls."""
_MAX_PATHS = 64


def find_unknown_fields(tools: Sequence[Lenient], given: Sequence[Any]) -> list[Path]:
    """Return the path of the first occurrence of each unknown name, for at most 64 names.

    Args:
        tools: the request's tools.
        given: the same tools as the client wrote them.
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
            if type(member) is not dict:  # such as a schema, whose names are the client's
                yield from _find_unknown_in_tool(member, value, (*path, name))
        elif name == "tools":
            yield from _find_unknown_in_list(getattr(tool, name), value, (*path, name))
