"""Detection of the end of an argument's value between tags.

The text of a value may itself contain the tags of the format. A closing tag therefore ends a value
only if, after optional white space, the next parameter or the end of the call follows. The parser
holds the tag back until it has read the following tag.

Models sometimes omit closing tags. In formats with line breaks around values, a line break
therefore also ends a value if one of the following comes after the line break:

- the tag of the next parameter;
- all tags that end a call;
- one or all of the tags that end a call, followed by the tag of the next call.

At the end of the response, a single closing tag is enough: the tag of the value or of the call.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MAX_SPACE_CHARS = 64
_SPACE = rf"[ \t\n\r]{{0,{_MAX_SPACE_CHARS}}}"


class _Part(NamedTuple):
    """Two regular expressions for a part of an ending, such as a tag.

    The first expression matches the complete part. The second expression matches any beginning of
    the part.
    """

    full: str
    begun: str


class ValueEnds:
    """Recognizer of the endings of values, for one format of calls.

    An ending is the text after a value that shows that the value has ended. It consists of tags,
    and of white space between them.

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
        """Return True if the text is an ending, or the beginning of an ending."""
        return self._begun.fullmatch(text) is not None

    def is_ending(self, text: str) -> bool:
        """Return True if the text is a complete ending, no matter which text follows."""
        return self._ended.fullmatch(text) is not None

    def is_last(self, text: str) -> bool:
        """Return True if the text is a complete ending when no text follows."""
        return self._at_end.fullmatch(text) is not None

    def next_call(self, ending: str) -> str:
        """Return the tag of the next call if `ending` ends with such a tag, otherwise ""."""
        return next((tag for tag in self._calls if ending.endswith(tag)), "")

    def split(self, text: str) -> tuple[str, str]:
        """Split a text that began like an ending, but is no ending.

        Return the part that belongs to the value, and the rest, which may be the beginning of an
        ending.
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
