"""The names of tools: to the model, and in the items that calls are."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, NamedTuple

CallKind = Literal["function_call", "custom_tool_call", "tool_search_call"]
# Names that are longer are refused by some templates and clients.
_MAX_FLAT_CHARS = 64


class ToolCallNames(NamedTuple):
    """The item that a call of a tool is, and the names in it."""

    kind: CallKind
    name: str
    namespace: str | None = None


def flat_name(namespace: str, name: str, *, short: bool = False) -> str:
    """Return the model's name for a namespace's tool; a short one has a digest at its end."""
    between = "" if namespace.endswith("__") else "__"
    flat = f"{namespace}{between}{name}"
    if len(flat) <= _MAX_FLAT_CHARS and not short:
        return flat
    digest = blake2b(f"{namespace}\n{name}".encode(), digest_size=4).hexdigest()
    return f"{flat[: _MAX_FLAT_CHARS - len(digest) - 1]}_{digest}"
