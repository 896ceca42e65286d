"""Strings of a limited length, written as patterns that xgrammar compiles in less time.

xgrammar writes a limited length as a chain of rules, one for each character, and tries the whole
vocabulary in each: 7 ms a character for 32,000 tokens. A group with a question mark is one rule,
however often it is repeated. So up to 100 characters are written as up to four blocks of 20
characters, which are compiled once, and up to 20 characters behind them.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from typing import Any, Literal, NamedTuple

Form = Literal["keywords", "blocks", "class"]
"""How the length of a string is sent: as minLength and maxLength, or as one of two patterns."""

_CHARACTER = '[^"\\\\\\x00-\\x1f]'
"""A character of a JSON string without an escape.

xgrammar has no escapes in a string of a limited length either, as it would count their letters.
"""
_RUN = 4
# A step of the matcher takes longer with more blocks, and with more tokens that leave a block.
_MIN_BLOCK_CHARS, _MAX_BLOCK_CHARS = 8, 32
_MAX_BLOCKS = 16
_LEAST_US, _LEAST_BEFORE_OTHERS_US, _BLOCK_US, _REST_US = 3_100, 6_500, 2_900, 4_800
"""Microseconds for each character that is required, in a block, or behind the blocks."""
# xgrammar writes out what a class is repeated up to so many times.
_MAX_UNROLLED = 128
_CLASS_US, _LONG_CLASS_US = 1_900, 0.3


class _Split(NamedTuple):
    """So many blocks of `size` characters, and `rest` characters behind them."""

    size: int
    blocks: int
    rest: int

    @property
    def cost(self) -> int:
        return _BLOCK_US * (self.size if self.blocks else 0) + _REST_US * self.rest


# Far above what is accepted. Python's integers may be too large for a float.
_MAX_WEIGHED = 10**6


@lru_cache(maxsize=1_024)
def _split(characters: int) -> _Split:
    """Return the cheapest split of up to `characters` characters."""
    found = [_Split(0, 0, characters)]
    smallest = max(_MIN_BLOCK_CHARS, isqrt(2 * characters))
    for size in range(min(smallest, _MAX_BLOCK_CHARS - 3), _MAX_BLOCK_CHARS + 1):
        # The characters behind the blocks fill the gap between two numbers of blocks.
        blocks = max(0, (characters - size + 1) // size)
        if blocks <= _MAX_BLOCKS:
            found.append(_Split(size, blocks, characters - blocks * size))
    return min(found, key=lambda split: split.cost)


def pattern_cost(least: int, most: int, form: Form) -> float:
    """Return the microseconds to compile what `length_pattern` returns."""
    least, most = min(least, _MAX_WEIGHED), min(most, _MAX_WEIGHED)
    if form == "class":
        if most <= _MAX_UNROLLED:
            return most * _CLASS_US
        return most**2 * _LONG_CLASS_US + least * _CLASS_US
    others = _split(most - least).cost
    return others + least * (_LEAST_BEFORE_OTHERS_US if others else _LEAST_US)


def length_pattern(least: int, most: int, form: Form) -> str:
    """Return an expression for texts of `least` to `most` characters without escapes."""
    if form == "class":
        return f"^{_CHARACTER}{{{least},{most}}}$"
    size, blocks, rest = _split(most - least)
    text = _CHARACTER * least
    if blocks:
        text += f"(({_CHARACTER * size})?){{0,{blocks}}}"
    return f"^{text}{_up_to(rest)}$"


def _up_to(most: int) -> str:
    """Return an expression for up to `most` characters, which reads a text in one way only."""
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
    """Return a schema as `rewrite` writes it, with a pattern for each maxLength."""
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
