"""The header `x-ignored-parameters`, which names parameters that had no effect.

Names come from clients, so each is escaped and cut, and the header has a bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

HEADER = "x-ignored-parameters"
MAX_NAME_CHARS = 200
MAX_HEADER_CHARS = 2048
_CUT = "..."
_MORE_CHARS = len(", and 200000 more")
# A comma separates names, and a backslash begins an escape.
_UNSAFE = re.compile(r"[^!-~]|[,\\]")


def build_headers(names: Iterable[str], more: int = 0) -> dict[str, str]:
    """Return the header; empty without names. `more` counts further names."""
    value = format_names(names, more)
    return {HEADER: value} if value else {}


def format_names(names: Iterable[str], more: int = 0) -> str:
    """Return the value of the header: distinct names, comma-separated, then `and N more`.

    The value is visible ASCII and spaces, of at most `MAX_HEADER_CHARS` characters.
    """
    distinct = list(dict.fromkeys(names))
    size, shown = 0, list[str]()
    for name in distinct:
        written = escape(name)
        size += len(written) + 2
        if size > MAX_HEADER_CHARS - _MORE_CHARS:
            break
        shown.append(written)
    if left := len(distinct) - len(shown) + more:
        shown.append(f"and {left} more")
    return ", ".join(shown)


def escape(name: str) -> str:
    r"""Return a name in visible ASCII, others escaped as in JSON (`\u00e9`), cut when long."""
    written = _UNSAFE.sub(_escape_char, name[: MAX_NAME_CHARS + 1])
    if len(written) > MAX_NAME_CHARS:
        written = written[: MAX_NAME_CHARS - len(_CUT)] + _CUT
    return written


def _escape_char(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
