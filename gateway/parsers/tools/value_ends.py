"""The end of a value between tags, whose text may contain the same tags.

A closing tag ends a value only if, after white space, the next parameter or the end of the call
follows. Until then the tag is held back. Models sometimes omit closing tags. So a value also ends:

- before the tag of the next parameter at the beginning of a line, in forms that write values on
  lines of their own;
- in the same forms, before all tags that end a call, at the beginning of a line; if the next call
  follows, one of these tags suffices;
- before a closing tag, or tags that end a call, as the last text of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MAX_SPACE_CHARS = 64
_SPACE = rf"[ \t\n\r]{{0,{_MAX_SPACE_CHARS}}}"


class _Part(NamedTuple):
    """A part of an ending: a pattern of the complete part, and a pattern of any beginning of it."""

    full: str
    begun: str


class ValueEnds:
    """Recognizer of the endings of values, for one form of calls.

    An ending is the text after a value that shows that the value has ended.

    Args:
        closing: the tag that closes a value.
        opening: the tag that opens the next parameter.
        calls: the tags that open a call.
        ends: the tags that end a call, in their order.
        lines: True if values have lines of their own: a line break before an ending is then a part
            of the ending.
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
        """Return True if the text is an ending, independent of what follows."""
        return self._ended.fullmatch(text) is not None

    def is_last(self, text: str) -> bool:
        """Return True if the text is an ending as the last text of the answer."""
        return self._at_end.fullmatch(text) is not None

    def next_call(self, ending: str) -> str:
        """Return the tag that opens the next call, if the ending includes one; otherwise ""."""
        return next((tag for tag in self._calls if ending.endswith(tag)), "")

    def split(self, text: str) -> tuple[str, str]:
        """Split text that is not an ending.

        Return the part that belongs to the value, and the rest, which may begin an ending.
        """
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
