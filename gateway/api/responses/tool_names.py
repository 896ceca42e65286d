"""Names of tools in the prompt, and in the items that represent calls."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal, NamedTuple

CallKind = Literal["function_call", "custom_tool_call", "tool_search_call"]
# Maximum length of a tool's name in the prompt. Some templates and clients refuse longer names.
_MAX_FLAT_CHARS = 64


class ToolCallNames(NamedTuple):
    """The item type of a tool's calls, and the tool's name and namespace in such an item."""

    kind: CallKind
    name: str
    namespace: str | None = None


def flat_name(namespace: str, name: str, *, short: bool = False) -> str:
    """Return the name in the prompt for a tool in a namespace, for example `files__read`.

    If `short` is True, or if this name would be too long, the name is cut and ends with a hash.
    """
    between = "" if namespace.endswith("__") else "__"
    flat = f"{namespace}{between}{name}"
    if len(flat) <= _MAX_FLAT_CHARS and not short:
        return flat
    digest = blake2b(f"{namespace}\n{name}".encode(), digest_size=4).hexdigest()
    return f"{flat[: _MAX_FLAT_CHARS - len(digest) - 1]}_{digest}"
