"""Patterns for strings of limited length, as a faster replacement of minLength and maxLength.

For these keywords, xgrammar makes a rule for each character, and matches the complete vocabulary
with each rule. With 32,000 tokens, this takes 7 ms per character. xgrammar compiles an optional
group only once, even if the group is repeated. The patterns therefore repeat an optional group of
many characters, called a block. A length of up to 100 characters, for example, becomes up to four
blocks of 20 characters, and up to 20 single characters.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from typing import Any, Literal, NamedTuple

Form = Literal["keywords", "blocks", "class"]
"""Form in which the gateway sends the maximum length of a string to the engine.

The forms are minLength and maxLength, a pattern of blocks, and a pattern that repeats a character
class.
"""

_CHARACTER = '[^"\\\\\\x00-\\x1f]'
"""Pattern of a character of a JSON string that needs no escape.

The patterns do not allow escapes, because each character of an escape sequence would count
toward the length. xgrammar's own strings of limited length do not allow escapes, either.
"""
_RUN = 4
# Minimum and maximum number of characters in a block, and maximum number of blocks. Many or short
# blocks make a decoding step slower, because more tokens cross the boundaries of blocks.
_MIN_BLOCK_CHARS, _MAX_BLOCK_CHARS = 8, 32
_MAX_BLOCKS = 16
_LEAST_US, _LEAST_BEFORE_OTHERS_US, _BLOCK_US, _REST_US = 3_100, 6_500, 2_900, 4_800
"""Microseconds to compile one character of a pattern, by the character's part of the pattern.

The first two constants are for required characters: in a pattern without optional characters, and
in a pattern with optional characters. The third is for a character of the block, however often the
block is repeated. The fourth is for a character after the blocks.
"""
# Maximum count of a repetition, as in `[a-z]{128}`, that xgrammar expands to copies of the class.
_MAX_UNROLLED = 128
_CLASS_US, _LONG_CLASS_US = 1_900, 0.3


class _Split(NamedTuple):
    """Split of a length: `blocks` blocks of `size` characters, and `rest` characters after them."""

    size: int
    blocks: int
    rest: int

    @property
    def cost(self) -> int:
        return _BLOCK_US * (self.size if self.blocks else 0) + _REST_US * self.rest


# Limit of lengths in cost estimates, far above the accepted lengths. A larger length is replaced by
# the limit, because a client's integer may be too large to be converted to a float.
_MAX_WEIGHED = 10**6


@lru_cache(maxsize=1_024)
def _split(characters: int) -> _Split:
    """Return the split that compiles fastest, for texts of up to `characters` characters."""
    found = [_Split(0, 0, characters)]
    smallest = max(_MIN_BLOCK_CHARS, isqrt(2 * characters))
    for size in range(min(smallest, _MAX_BLOCK_CHARS - 3), _MAX_BLOCK_CHARS + 1):
        # Leave at least size - 1 single characters after the blocks. Otherwise, a text whose length
        # is not a multiple of `size` would not always match.
        blocks = max(0, (characters - size + 1) // size)
        if blocks <= _MAX_BLOCKS:
            found.append(_Split(size, blocks, characters - blocks * size))
    return min(found, key=lambda split: split.cost)


def pattern_cost(least: int, most: int, form: Form) -> float:
    """Return the microseconds to compile the pattern that `length_pattern` returns."""
    least, most = min(least, _MAX_WEIGHED), min(most, _MAX_WEIGHED)
    if form == "class":
        if most <= _MAX_UNROLLED:
            return most * _CLASS_US
        return most**2 * _LONG_CLASS_US + least * _CLASS_US
    others = _split(most - least).cost
    return others + least * (_LEAST_BEFORE_OTHERS_US if others else _LEAST_US)


def length_pattern(least: int, most: int, form: Form) -> str:
    """Return a pattern for texts of `least` to `most` characters without escapes."""
    if form == "class":
        return f"^{_CHARACTER}{{{least},{most}}}$"
    size, blocks, rest = _split(most - least)
    text = _CHARACTER * least
    if blocks:
        text += f"(({_CHARACTER * size})?){{0,{blocks}}}"
    return f"^{text}{_up_to(rest)}$"


def _up_to(most: int) -> str:
    """Return a pattern for up to `most` characters. It can match each text in one way only."""
    runs, last = divmod(most, _RUN)
    if runs and last < _RUN:
        runs, last = runs - 1, last + _RUN
    found = _optional([_CHARACTER * count for count in range(1, last + 1)])
    for _ in range(runs):
        shorter = [_CHARACTER * count for count in range(1, _RUN)]
        found = _optional([*shorter, _CHARACTER * _RUN + found])
    return found


def _optional(alternatives: list[str]) -> str:
    return f"({'|'.join(alternatives)})?" if alternatives else ""


def write_lengths(schema: Any, form: Form) -> Any:
    """Return a schema from `rewrite` in which a pattern replaces maxLength and minLength.

    Schemas without maxLength are not changed.
    """
    if form == "keywords" or not isinstance(schema, dict):
        return schema
    if "maxLength" in schema:
        least, most = schema.get("minLength", 0), schema["maxLength"]
        return {"type": "string", "pattern": length_pattern(int(least), int(most), form)}
    found = dict(schema)
    for keyword in ("properties", "patternProperties", "$defs"):
        if keyword in found:
            parts = found[keyword].items()
            found[keyword] = {name: write_lengths(each, form) for name, each in parts}
    for keyword in ("anyOf", "prefixItems"):
        if keyword in found:
            found[keyword] = [write_lengths(each, form) for each in found[keyword]]
    for keyword in ("items", "additionalProperties"):
        if keyword in found:
            found[keyword] = write_lengths(found[keyword], form)
    return found
