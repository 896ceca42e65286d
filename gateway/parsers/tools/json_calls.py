"""Parsing of calls that are JSON objects: `{"name": ..., "arguments": {...}}`.

Arguments are reported character by character, as the model writes them. Two mistakes of small
models are corrected. Unescaped control characters in strings are escaped. Closing brackets that are
missing before the closing tag are added. The parser only counts brackets, and does not validate the
JSON. The module `arguments` checks if arguments are a JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from gateway.parsers.tools.parser import Functions, NotACall, Step, ToolParser

_ARGUMENTS = frozenset({"arguments", "parameters"})
# Keys that a call may have.
_KEYS = _ARGUMENTS | {"name", "type", "id"}
_CLOSING = {"{": "}", "[": "]"}
# Matches a lone surrogate (half of a surrogate pair), which is not valid Unicode.
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"


class JsonToolParser(ToolParser):
    """Parser of calls that are JSON objects, with keys in any order and any whitespace.

    If an object is not between tags, it is a call only if it has a name, arguments and no unknown
    key. Any other object may be an answer in JSON. Between tags, each object with a name is a call:
    unknown keys are skipped, and missing arguments are reported as `{}`.
    """

    def __init__(self, functions: Functions | None = None) -> None:
        super().__init__(functions)
        self._early: str | None = None
        # Closing brackets that were missing at the end of the last arguments.
        self._missing = ""

    def _object(self, char: str) -> Step:
        """Parse a call's object after its opening brace."""
        self._early = None
        char = yield from self._space(char)
        while char != "}":
            if char != '"':
                raise NotACall(char)
            key, char = yield from self._string(char)
            char = yield from self._space(char)
            if char != ":":
                raise NotACall(char)
            self._hold(char)
            char = yield from self._space((yield))
            char = yield from self._member(key, char)
            char = yield from self._space(char)
            if char == ",":
                self._hold(char)
                char = yield from self._space((yield))
            elif char != "}":
                raise NotACall(char)
        if self._undecided:
            if self._name is None or not self.tagged:
                raise NotACall(char)
            self._start_with("{}")
        return (yield)

    def _list(self, char: str) -> Step:
        """Parse the objects of a list of calls after its opening bracket."""
        before = self.calls
        while True:
            char = yield from self._space(char)
            if char == "]" and self.calls > before:
                self._drop()
                return (yield)
            if char != "{":
                raise NotACall(char)
            self._hold(char)
            char = yield from self._object((yield))
            char = yield from self._space(char)
            if char == "]":
                return (yield)
            if char != ",":
                raise NotACall(char)
            self._undecided = True
            char = yield

    def _member(self, key: str, char: str) -> Step:
        """Parse the value of the property `key` of a call's object."""
        if not self._undecided:
            return (yield from self._value(char))
        if key == "name":
            if char != '"':
                raise NotACall(char)
            name, char = yield from self._string(char)
            if not name or _REPLACEMENT in name:
                raise NotACall(char)
            self._name = name
            if self._early is not None:
                self._start_with(self._early)
        elif key in _ARGUMENTS:
            if char == "{" and self._name is not None:
                self._commit(self._name)
                return (yield from self._value(char, self._events.arguments))
            self._early, char = yield from self._early_arguments(char)
            if self._name is not None:
                self._start_with(self._early)
        elif not self.tagged and key not in _KEYS:
            raise NotACall(char)
        else:
            char = yield from self._value(char)
        return char

    def _start_with(self, arguments: str) -> None:
        assert self._name is not None
        self._commit(self._name)
        self._events.arguments(arguments)

    def _early_arguments(self, char: str) -> Generator[None, str, tuple[str, str]]:
        """Parse arguments that cannot be streamed. Return the arguments and the next character.

        Arguments cannot be streamed if they come before the name, if they are JSON text in a
        string, or if they are null.
        """
        if char == '"':
            text, char = yield from self._string(char)
        else:
            pieces: list[str] = []
            char = yield from self._value(char, pieces.append)
            text = "".join(pieces)
        if text == "null":
            text = "{}"
        if not text.lstrip().startswith("{"):
            raise NotACall(char)
        return text, char

    def _string(self, char: str) -> Generator[None, str, tuple[str, str]]:
        """Parse a JSON string; return the decoded string and the next character."""
        pieces: list[str] = []
        char = yield from self._value(char, pieces.append)
        try:
            text: str = json.loads("".join(pieces))
        except ValueError:
            raise NotACall(char) from None
        return _SURROGATE.sub(_REPLACEMENT, text), char

    def _value(self, char: str, sink: Callable[[str], object] | None = None) -> Step:
        """Parse a JSON value. Pass its text to `sink`, unless `sink` is None."""
        if char == '"' or char in _CLOSING:
            return (yield from self._read_delimited(char, sink))
        empty = True
        while char.isalnum() or char in "+-.":
            empty = False
            self._hold(char)
            if sink is not None:
                sink(char)
            char = yield
        if empty:
            raise NotACall(char)
        return char

    def _read_delimited(self, char: str, sink: Callable[[str], object] | None) -> Step:
        opening, closing = char, _CLOSING.get(char)
        depth = 0
        quoted = escaped = False
        missing: list[str] = []
        while True:
            # Outside of strings, JSON has no `<`. This `<` therefore begins a closing tag, and the
            # model has omitted closing brackets before the tag.
            if char == "<" and not quoted:
                if sink == self._events.arguments:
                    self._missing = "".join(reversed(missing))
                raise NotACall(char)
            self._hold(char)
            if sink is not None:
                sink(char if char >= " " or not quoted else json.dumps(char)[1:-1])
            if escaped:
                escaped = False
            elif quoted and char == "\\":
                escaped = True
            elif char == '"':
                quoted = not quoted
                if closing is None and not quoted:
                    return (yield)
            elif not quoted and char in "{}[]":
                if char in _CLOSING:
                    missing.append(_CLOSING[char])
                elif missing and missing[-1] == char:
                    missing.pop()
                depth += (char == opening) - (char == closing)
                if not depth:
                    return (yield)
            char = yield
