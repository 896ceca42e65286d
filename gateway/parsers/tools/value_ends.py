"""Detection of the end of an argument's value between tags.

The text of a value may contain the same tags as the format. A closing tag therefore ends a value
only if the next parameter or the end of the call follows, after optional white space. Until then,
the tag is held back. Models sometimes omit closing tags. A value therefore also ends:

- before the tag of the next parameter at the beginning of a line, in formats with line breaks
  around values;
- in the same formats, before all tags that end a call, at the beginning of a line; if the next call
  follows, one of these tags suffices;
- before a closing tag, or before the tags that end a call, at the end of the response.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MAX_SPACE_CHARS = 64
_SPACE = rf"[ \t\n\r]{{0,{_MAX_SPACE_CHARS}}}"


class _Part(NamedTuple):
    """Element of an ending, as two patterns: of the complete element, and of its prefixes."""

    full: str
    begun: str


class ValueEnds:
    """Recognizer of the endings of values, for one format of calls.

    An ending is text after a value that proves that the value has ended: mostly tags.

    Args:
        closing: the tag that closes a value.
        opening: the tag that opens the next parameter.
        calls: the tags that open a call.
        ends: the tags that end a call, in their order.
        lines: True if line breaks surround each value. A line break before an ending then belongs
            to the ending.
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
        """Return True if the text is an ending, or may become an ending."""
        return self._begun.fullmatch(text) is not None

    def is_ending(self, text: str) -> bool:
        """Return True if the text is an ending, independent of the text after it."""
        return self._ended.fullmatch(text) is not None

    def is_last(self, text: str) -> bool:
        """Return True if the text is an ending when no more text follows."""
        return self._at_end.fullmatch(text) is not None

    def next_call(self, ending: str) -> str:
        """Return the tag of the next call if `ending` ends with such a tag, otherwise ""."""
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
    """Return a pattern of all prefixes of a tag."""
    pattern = ""
    for char in reversed(tag):
        pattern = re.escape(char) + (f"(?:{pattern})?" if pattern else "")
    return pattern


def _matcher(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns))
