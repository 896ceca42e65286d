"""The header `x-ignored-parameters`, which names parameters that had no effect.

The names come from clients. So each name is escaped and cut, and the header's length is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

HEADER = "x-ignored-parameters"
MAX_NAME_CHARS = 200
MAX_HEADER_CHARS = 2048
_CUT = "..."
_MORE_CHARS = len(", and 200000 more")
# Characters to escape: all characters outside of visible ASCII (also spaces), commas and
# backslashes. A comma separates two names in the header.
_UNSAFE = re.compile(r"[^!-~]|[,\\]")


def build_headers(names: Iterable[str], more: int = 0) -> dict[str, str]:
    """Return the header `x-ignored-parameters` as a dict; {} if there are no ignored parameters.

    `more` is the number of further ignored parameters whose names are not in `names`.
    """
    value = format_names(names, more)
    return {HEADER: value} if value else {}


def format_names(names: Iterable[str], more: int = 0) -> str:
    """Return the header's value: the distinct names, separated by commas.

    If not all names fit or `more` is not 0, the value ends with `and N more`. The value consists of
    visible ASCII and spaces, and has at most `MAX_HEADER_CHARS` characters.
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
    r"""Escape the characters of `_UNSAFE` as in JSON (`\u00e9`), and cut a long name."""
    written = _UNSAFE.sub(_escape_char, name[: MAX_NAME_CHARS + 1])
    if len(written) > MAX_NAME_CHARS:
        written = written[: MAX_NAME_CHARS - len(_CUT)] + _CUT
    return written


def _escape_char(found: re.Match[str]) -> str:
    return f"\\u{ord(found[0]):04x}"
