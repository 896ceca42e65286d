"""The end of a value between tags, whose text may contain the same tags.

A closing tag closes a value only if the next parameter or the end of the call follows, apart from
white space. Until then the tag is held back. Models also leave closing tags out, so a value ends,
too:

- where the next parameter's tag begins a line, in forms whose values have lines of their own;
- where the tags that end a call begin a line, all of them or with the next call after them;
- where such tags are the last text of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MAX_SPACE_CHARS = 64
_SPACE = rf"[ \t\n\r]{{0,{_MAX_SPACE_CHARS}}}"


class _Part(NamedTuple):
    """A part of an ending: the pattern of all of it, and that of any beginning of it."""

    full: str
    begun: str


class ValueEnds:
    """The endings of the values of one form.

    Args:
        closing: the tag that closes a value.
        opening: the tag that opens the next parameter.
        calls: the tags that open a call.
        ends: the tags that end a call, in their order.
        lines: True if a line break before the ending belongs to it.
    """

    def __init__(
        self, closing: str, opening: str, calls: Sequence[str], ends: Sequence[str], *, lines: bool
    ) -> None:
        self._calls = tuple(calls)
        self.first = frozenset({"<", "\n"} if lines else {"<"})
        space, line = _Part(_SPACE, _SPACE), _Part("\n", "\n")
        may_break = [_Part("\n?", "\n?")] if lines else []
        end, close, next_ = _tag(*ends), _tag(closing), _tag(opening)
        whole_end = [end] if len(ends) == 1 else [_tag(ends[0]), space, _tag(*ends[1:])]
        endings = [[*may_break, close, space, _tag(opening, *ends)]]
        if lines:
            endings += [[line, next_], [line, *whole_end]]
            endings += [[line, *last, space, _tag(*calls)] for last in ([end], whole_end)]
        last = [[*may_break, *tags, space] for tags in ([close], [end], whole_end)]
        self._ended = _matcher("".join(part.full for part in ending) for ending in endings)
        self._at_end = _matcher("".join(part.full for part in ending) for ending in last)
        self._begun = _matcher(
            "".join(part.full for part in ending[:count]) + ending[count].begun
            for ending in endings + last
            for count in range(len(ending))
        )

    def may_begin(self, text: str) -> bool:
        """Return True if the text is an ending or the beginning of one."""
        return self._begun.fullmatch(text) is not None

    def is_ending(self, text: str) -> bool:
        """Return True if the text ends a value, whatever follows."""
        return self._ended.fullmatch(text) is not None

    def is_last(self, text: str) -> bool:
        """Return True if the text ends a value as the last text of the answer."""
        return self._at_end.fullmatch(text) is not None

    def next_call(self, ending: str) -> str:
        """Return the tag at the end of an ending that opens the next call; "" if there is none."""
        return next((tag for tag in self._calls if ending.endswith(tag)), "")

    def split(self, text: str) -> tuple[str, str]:
        """Split text that is not an ending into the part of the value and the part that may be an
        ending."""
        for start in range(1, len(text)):
            if text[start] in self.first and self.may_begin(text[start:]):
                return text[:start], text[start:]
        return text, ""


def _tag(*tags: str) -> _Part:
    return _Part(f"(?:{'|'.join(map(re.escape, tags))})", f"(?:{'|'.join(map(_beginnings, tags))})")


def _beginnings(tag: str) -> str:
    """Return the pattern of all beginnings of a tag."""
    pattern = ""
    for char in reversed(tag):
        pattern = re.escape(char) + (f"(?:{pattern})?" if pattern else "")
    return pattern


def _matcher(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns))
