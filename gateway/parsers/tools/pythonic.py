"""Parser of Python-like tool calls: Llama 3.2 and 4 (pythonic), ToolACE.

    [get_weather(city="Paris", days=3), get_time()]

The list is at the beginning of the output, or after one of the tokens in `markers`. Values are
converted to JSON while they are parsed, and are never evaluated as Python. A value that is not a
Python literal becomes a string, because the examples in these models' chat templates have strings
without quotes: `[get_weather(city=Paris)]`.

Source: Llama 3.2 and 4 prompt formats; vLLM's parsers `pythonic` and `llama4_pythonic`.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import ClassVar

from gateway.parsers.tools.literals import read_value
from gateway.parsers.tools.parser import NotACall, Step, ToolParser

_START, _END, _PYTHON_TAG = "<|python_start|>", "<|python_end|>", "<|python_tag|>"


class PythonicToolParser(ToolParser):
    """Parser of lists of Python-like calls.

    A call is reported as soon as the name of its first argument has been read. A call without
    arguments is reported at its closing parenthesis. The values of arguments are streamed.
    """

    markers: ClassVar[tuple[str, ...]] = (_START, _END, _PYTHON_TAG)
    tagged = False

    def _run(self) -> Generator[None, str, None]:
        char = yield from self._gap((yield))
        if char == "[":
            self._undecided = True
            self._hold(char)
            char = yield from self._attempt(self._list((yield)))
        while True:
            tag = yield from self._text(char, self.markers)
            if tag == _END and self.calls:
                self._drop()
                char = yield
                continue
            char = yield from self._space((yield))
            if char == "[":
                self._hold(char)
                char = yield from self._attempt(self._list((yield)))
            else:
                self._release()

    def _list(self, char: str) -> Step:
        """Parse the calls of a list after its opening bracket."""
        while True:
            char = yield from self._space(char)
            char = yield from self._call(char)
            char = yield from self._space(char)
            if char == "]":
                return (yield)
            if char != ",":
                raise NotACall(char)
            self._undecided = True
            char = yield

    def _call(self, char: str) -> Step:
        name, char = yield from self._identifier(char, "_-.:/")
        if not name or char != "(":
            raise NotACall(char)
        self._hold(char)
        char = yield from self._space((yield))
        separator = "{"
        while char != ")":
            keyword, char = yield from self._identifier(char, "_-.")
            char = yield from self._space(char)
            if not keyword or char != "=":
                raise NotACall(char)
            self._hold(char)
            char = yield from self._space((yield))
            if char == "=":
                raise NotACall(char)
            if self._undecided:
                self._commit(name)
            self._events.arguments(f"{separator}{json.dumps(keyword)}: ")
            separator = ", "
            char = yield from read_value(char, ",)", self._events.arguments)
            if char == ",":
                char = yield from self._space((yield))
            elif char != ")":
                raise NotACall(char)
        if self._undecided:
            self._commit(name)
            self._events.arguments("{")
        self._events.arguments("}")
        return (yield)

    def _identifier(self, char: str, others: str) -> Generator[None, str, tuple[str, str]]:
        """Parse the name of a function or parameter. Return the name and the next character.

        A name consists of letters, digits and the characters in `others`. Some of these characters
        are invalid in Python names. If the name begins with a digit, the returned name is "".
        """
        letters: list[str] = []
        while char.isalnum() or char in others:
            letters.append(char)
            self._hold(char)
            char = yield
        name = "".join(letters)
        return ("" if name[:1].isdigit() else name), char
