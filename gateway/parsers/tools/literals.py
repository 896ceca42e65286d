"""Conversion of Python literals to JSON, character by character.

The text is never evaluated as Python, except text that has the form of a number. Text that is not a
literal becomes a JSON string.

The parsing functions are generators that receive one character per `send`. The parameter `char` is
the first character of the text to parse. The result is the first character after that text. A
parsing function passes JSON text to `sink`, and raises NotACall if the text cannot be a value.
"""

from __future__ import annotations

import ast
import json
import re
import string
import sys
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

from gateway.parsers.tools.parser import NotACall, Step

Sink = Callable[[str], object]
_Reading: TypeAlias = "Generator[_Reading | None, str, str]"
"""Parser of a value, for `read_value`.

It yields None to get the next character. It yields another parser to let that parser parse a nested
value.
"""

_MAX_DEPTH = 32
_CONSTANTS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_NUMBER = re.compile(r"[+-]?(0[xob][\da-f_]+|[\d_.]+(e[+-]?\d+)?)", re.IGNORECASE | re.ASCII)
# Integers and decimals that are valid JSON. Group 1 is set only for decimals. These numbers are
# converted without `ast.literal_eval`, which takes 9 us for each number.
_JSON_NUMBER = re.compile(r"0|-?[1-9]\d{0,17}|(-?(?:0|[1-9]\d{0,17})\.\d{1,17})", re.ASCII)
_STRING_PREFIXES = frozenset("rbufRBUF")
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "\n": "",
    "\\": "\\",
    "'": "'",
    '"': '"',
}
# For each escape with a character code, the maximum number of digits and the base of the number.
_CODES = {"x": (2, 16), "u": (4, 16), "U": (8, 16)} | dict.fromkeys("01234567", (3, 8))


def read_value(char: str, ends: str, sink: Sink) -> Step:
    """Parse a value and the whitespace after it. `ends` are the characters that may follow.

    The parsers of nested values are stored on a stack, and only the innermost parser receives a
    character. If each parser called the parser of its nested value, each character would pass
    through the parsers of all outer values. A deeply nested text of 16,000 characters would then
    take 25 ms.
    """
    stack: list[_Reading] = [_value(char, ends, sink, 0)]
    given: Any = None
    while stack:
        try:
            within = stack[-1].send(given)
        except StopIteration as end:
            stack.pop()
            given = end.value
            continue
        if within is None:
            given = yield
        else:
            stack.append(within)
            given = None
    following: str = given
    return following


def _value(char: str, ends: str, sink: Sink, depth: int) -> _Reading:
    if depth > _MAX_DEPTH:
        raise NotACall(char)
    if char in "'\"":
        char = yield from _string(char, sink)
    elif char == "[":
        char = yield from _list(sink, depth)
    elif char == "(":
        char = yield from _parenthesis(sink, depth)
    elif char == "{":
        char = yield from _dict(sink, depth)
    else:
        char = yield from _atom(char, ends, sink)
    return (yield from _space(char))


def _list(sink: Sink, depth: int) -> _Reading:
    char = yield from _space((yield None))
    separator = "["
    while char != "]":
        sink(separator)
        separator = ", "
        char = yield _value(char, ",]", sink, depth + 1)
        if char == ",":
            char = yield from _space((yield None))
        elif char != "]":
            raise NotACall(char)
    sink("[]" if separator == "[" else "]")
    return (yield None)


def _parenthesis(sink: Sink, depth: int) -> _Reading:
    """Parse a tuple, or a single value in parentheses."""
    pieces: list[str] = []
    values = commas = 0
    char = yield from _space((yield None))
    while char != ")":
        char = yield _value(char, ",)", pieces.append, depth + 1)
        values += 1
        if char == ",":
            commas += 1
            pieces.append(", ")
            char = yield from _space((yield None))
        elif char != ")":
            raise NotACall(char)
    if commas == values and commas:
        pieces.pop()
    text = "".join(pieces)
    sink(text if values == 1 and not commas else f"[{text}]")
    return (yield None)


def _dict(sink: Sink, depth: int) -> _Reading:
    char = yield from _space((yield None))
    separator = "{"
    while char != "}":
        key: list[str] = []
        char = yield _value(char, ":", key.append, depth + 1)
        if char != ":":
            raise NotACall(char)
        text = "".join(key)
        # Convert a key that is not a string to a string: JSON allows only strings as keys.
        quoted = text if text.startswith('"') else json.dumps(text)
        sink(f"{separator}{quoted}: ")
        separator = ", "
        char = yield from _space((yield None))
        char = yield _value(char, ",}", sink, depth + 1)
        if char == ",":
            char = yield from _space((yield None))
        elif char != "}":
            raise NotACall(char)
    sink("{}" if separator == "{" else "}")
    return (yield None)


def _atom(char: str, ends: str, sink: Sink) -> Step:
    """Parse a number, a constant, or any other text up to one of `ends`."""
    # Collect the characters in a list, because adding a character to a string may copy the string.
    source: list[str] = []
    quote = ""
    depth = 0
    while quote or depth or char not in ends:
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and len(source) == 1 and source[0] in _STRING_PREFIXES:
            return (yield from _string(char, sink, raw=source[0] in "rR"))
        # A quote after a letter or digit is an apostrophe: `Martha's`.
        elif char in "'\"" and not source[-1].isalnum():
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            if not depth:
                raise NotACall(char)
            depth -= 1
        source.append(char)
        char = yield
    if not source:
        raise NotACall(char)
    sink(_literal("".join(source).rstrip()))
    return char


def _string(char: str, sink: Sink, *, raw: bool = False) -> Step:
    """Parse a string literal and all adjacent string literals as one JSON string."""
    sink('"')
    while char in "'\"":
        char = yield from _read_quoted(char, sink, raw)
        char = yield from _space(char)
    sink('"')
    return char


def _read_quoted(quote: str, sink: Sink, raw: bool) -> Step:
    end = quote
    char = yield
    if char == quote:
        char = yield
        if char != quote:
            return char
        end = quote * 3
        char = yield
    closing = ""
    while True:
        if char == quote:
            closing += char
            if closing == end:
                return (yield)
            char = yield
            continue
        if closing:
            sink(escape_json(closing))
            closing = ""
        if char == "\\" and not raw:
            char = yield from _escape(sink)
            continue
        sink(escape_json(char))
        if char == "\\":
            sink(escape_json((yield)))
        char = yield


def _escape(sink: Sink) -> Step:
    """Parse the rest of an escape after the backslash.

    An escape that Python does not know is unchanged.
    """
    kind = yield
    if kind not in _CODES:
        sink(escape_json(_ESCAPES.get(kind, "\\" + kind)))
        return (yield)
    most, base = _CODES[kind]
    digits = kind if base == 8 else ""
    char = yield
    while len(digits) < most and char in (string.octdigits if base == 8 else string.hexdigits):
        digits += char
        char = yield
    code = int(digits, base) if base == 8 or len(digits) == most else sys.maxunicode + 1
    sink(escape_json(chr(code) if code <= sys.maxunicode else f"\\{kind}{digits}"))
    return char


def _space(char: str) -> Step:
    while char in " \t\n\r":
        char = yield
    return char


def escape_json(text: str) -> str:
    """Return the text as it is written in a JSON string. Lone surrogates are escaped."""
    if text.isalnum():
        return text
    ascii_only = any("\ud800" <= char <= "\udfff" for char in text)
    return json.dumps(text, ensure_ascii=ascii_only)[1:-1]


def _literal(source: str) -> str:
    """Return the JSON of a number or constant. Return any other text as a JSON string."""
    if source in _CONSTANTS:
        return _CONSTANTS[source]
    if number := _JSON_NUMBER.fullmatch(source):
        return repr(float(source)) if number[1] else source
    if _NUMBER.fullmatch(source):
        try:
            return json.dumps(ast.literal_eval(source), allow_nan=False)
        except (ValueError, SyntaxError, TypeError):  # such as `...`, which JSON cannot express
            pass
    return f'"{escape_json(source)}"'
