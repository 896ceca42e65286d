"""Parsing of calls between tags, for forms that are described as data.

A `TaggedForm` describes the tags of a form, and how names and arguments are written. The same
`TaggedToolParser` parses all such forms. Missing closing tags, and missing or additional braces,
are accepted, because small models make these mistakes.

See decision 017 in docs/decisions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from dataclasses import dataclass
from functools import cached_property

from gateway.parsers.tools.events import Event
from gateway.parsers.tools.json_calls import JsonToolParser
from gateway.parsers.tools.literals import Sink, escape_json
from gateway.parsers.tools.parser import Functions, NotACall, Step, ToolParser
from gateway.parsers.tools.typed_values import STRING, as_json, types_of
from gateway.parsers.tools.value_ends import ValueEnds

_TAG = re.compile(r"<[^<>]+>")


@dataclass(frozen=True)
class Name:
    """The form of a function's name, which comes before the arguments.

    Attributes:
        opening: the opening tag of the call, before the name.
        before: text between `opening` and the name.
        after: text after the name. If empty, the name ends at the first character that names do not
            have.
        pattern: matches the text between `before` and `after`; the first group is the name.
    """

    opening: str
    before: str = ""
    after: str = ""
    pattern: re.Pattern[str] = re.compile("(.+)")


@dataclass(frozen=True)
class ParameterTags:
    """The form of arguments that are written one by one, with tags around key and value.

    The module `value_ends` decides which tags end a value.

    Attributes:
        key: the tags before and after a key.
        value: the tags before and after a value.
        lines: True if a value is on lines of its own. The line breaks around it are no part of it.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    lines: bool = False


@dataclass(frozen=True)
class TaggedForm:
    """Description of a form of calls between tags. Calling it returns a parser.

    Attributes:
        openings: the tags that may begin a call.
        closings: the tags that may follow a call, in this order.
        name: the form of the function's name. None if a call is a JSON object with name and
            arguments, or a list of such objects.
        parameters: the form of the arguments after a `name`; None if they are a JSON object.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...] = ()
    name: Name | None = None
    parameters: ParameterTags | None = None

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """Return the tags that tokenizers may list as special tokens."""
        tags = [*self.openings, *self.closings]
        if self.name is not None:
            tags += [self.name.before, self.name.after]
        if self.parameters is not None:
            tags += [*self.parameters.key, *self.parameters.value]
        return tuple(marker for tag in tags for marker in _TAG.findall(tag))

    @cached_property
    def value_ends(self) -> ValueEnds:
        """Return the recognizer of the endings of values. The form must have `parameters`."""
        assert self.parameters is not None
        opening, closing = self.parameters.key[0], self.parameters.value[1]
        lines = self.parameters.lines
        return ValueEnds(closing, opening, self.openings, self.closings, lines=lines)

    def __call__(self, functions: Functions | None = None) -> ToolParser:
        return TaggedToolParser(self, functions)


class TaggedToolParser(JsonToolParser):
    """Parser of the calls of one form. `functions` are used only for the types of parameters."""

    def __init__(self, form: TaggedForm, functions: Functions | None = None) -> None:
        self._form = form
        self._functions = functions or {}
        self._types: dict[tuple[str, str], frozenset[str]] = {}
        # The current value, and the end of its text that may be the beginning of an ending.
        self._open_value: _Value | None = None
        self._tail = ""
        # The opening tag of the next call, if it has been consumed to find the end of a value.
        self._next_call = ""
        super().__init__()

    def _opening_tags(self) -> tuple[str, ...]:
        return tuple(tag for tag in self._form.openings if tag.startswith("<"))

    def _run(self) -> Generator[None, str, None]:
        form = self._form
        closings: tuple[str, ...] = ()
        char = yield
        while True:
            if self._next_call:
                tag, self._next_call = self._next_call, ""
                self._held.append(tag)
                self._undecided = True
            else:
                tag = yield from self._text(char, form.openings + closings)
            if tag in closings:
                self._drop()
                if self._missing and self._events.in_call:
                    self._events.arguments(self._missing)
                    self._missing = ""
                closings = closings[closings.index(tag) + 1 :]
                char = yield
                continue
            before = self.calls
            self._missing = ""
            char = yield from self._attempt(self._call(tag, (yield)))
            if self.calls > before:
                closings = form.closings
                if form.parameters is None:
                    char = yield from self._rest(char)

    def _call(self, tag: str, char: str) -> Step:
        """Parse the text after an opening tag."""
        form = self._form
        if form.name is not None:
            name, char = yield from self._read_name(form.name, tag, char)
            if form.parameters is not None:
                return (yield from self._parameters(form.parameters, name, char))
            char = yield from self._space(char)
            if char != "{":
                raise NotACall(char)
            self._commit(name)
            return (yield from self._value(char, self._events.arguments))
        char = yield from self._space(char)
        if char not in "[{":
            raise NotACall(char)
        self._hold(char)
        read = self._list if char == "[" else self._object
        return (yield from read((yield)))

    def _rest(self, char: str) -> Step:
        """Skip extra braces after a call, and parse further calls before the closing tag."""
        char = yield from self._gap(char)
        while char in "{}":
            if char == "}":
                self._drop()
                char = yield
            else:
                before = self.calls
                self._undecided = True
                self._hold(char)
                char = yield from self._attempt(self._object((yield)))
                if self.calls == before:
                    return char
            char = yield from self._gap(char)
        return char

    def _read_name(self, form: Name, tag: str, char: str) -> Generator[None, str, tuple[str, str]]:
        """Parse the name with the text around it; return the name and the next character."""
        if tag != form.opening:
            char = yield from self._space(char)
            yield from self._tag(char, (form.opening,))
            char = yield
        if form.before:
            yield from self._tag(char, (form.before,))
            char = yield
        char = yield from self._space(char)
        letters: list[str] = []
        while char.isalnum() or char in "_-.:/":
            letters.append(char)
            self._hold(char)
            char = yield
        found = form.pattern.fullmatch("".join(letters))
        if found is None:
            raise NotACall(char)
        name = found[1]
        if form.after:
            char = yield from self._space(char)
            yield from self._tag(char, (form.after,))
            self._name = name
            char = yield
        elif char.isspace():
            self._name = name
        return name, char

    def _parameters(self, form: ParameterTags, function: str, char: str) -> Step:
        opening = form.key[0]
        char = yield from self._space(char)
        tag = yield from self._tag(char, (opening, *self._form.closings))
        self._commit(function)
        self._events.arguments("{")
        separator = ""
        while tag == opening:
            key = yield from self._key(form)
            self._events.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            char = yield
            if form.lines and char == "\n":
                char = yield
            ending = yield from self._read_typed(char, self._types_of(function, key))
            self._next_call = self._form.value_ends.next_call(ending)
            tag = opening if ending.endswith(opening) else ""
        self._events.arguments("}")
        return "" if self._next_call else (yield)

    def finish(self, *, cut: bool = False) -> list[Event]:
        """End the text; return the events of text that was held back.

        A call whose last value has ended is completed if the model ended the text. If the text was
        cut, the call stays incomplete, since another parameter might have followed.
        """
        value, self._open_value = self._open_value, None
        if value is not None:
            if self._form.value_ends.is_last(self._tail):
                value.close()
                if not cut:
                    self._events.arguments("}")
            elif not cut and self._tail:
                value.add(self._tail)
        return super().finish(cut=cut)

    def _key(self, form: ParameterTags) -> Generator[None, str, str]:
        """Parse a key and the tags up to the value; return the key."""
        key: list[str] = []
        end = form.key[1]
        while not (len(key) >= len(end) and "".join(key[-len(end) :]) == end):
            key.append((yield))
        if form.value[0]:
            char = yield from self._space((yield))
            yield from self._tag(char, (form.value[0],))
        return "".join(key[: -len(end)]).strip()

    def _read_typed(self, char: str, types: frozenset[str]) -> Generator[None, str, str]:
        """Parse a value and report its JSON, streaming strings; return the ending of the value."""
        value = self._open_value = _Value(types, self._events.arguments)
        ends = self._form.value_ends
        self._tail = ""
        while True:
            if not self._tail and char not in ends.first:
                value.add(char)
            else:
                self._tail += char
                if not ends.may_begin(self._tail):
                    text, self._tail = ends.split(self._tail)
                    value.add(text)
                if self._tail and ends.is_ending(self._tail):
                    break
            char = yield
        value.close()
        self._open_value = None
        return self._tail

    def _types_of(self, function: str, key: str) -> frozenset[str]:
        types = self._types.get((function, key))
        if types is None:
            types = types_of(self._functions.get(function), key)
            self._types[function, key] = types
        return types

    def _tag(self, char: str, tags: tuple[str, ...]) -> Generator[None, str, str]:
        """Parse one of the tags and return it. No tag may be the beginning of another one.

        The last character that is consumed is the tag's, unlike in other parsing functions.
        """
        tag = char
        while any(each.startswith(tag) for each in tags):
            self._hold(char)
            if tag in tags:
                return tag
            char = yield
            tag += char
        raise NotACall(char)


class _Value:
    """The value of one parameter while it is generated. Only a string is passed on before its
    end."""

    def __init__(self, types: frozenset[str], sink: Sink) -> None:
        self._types = types
        self._sink = sink
        self._pieces: list[str] = []
        if types == STRING:
            sink('"')

    def add(self, text: str) -> None:
        if self._types == STRING:
            self._sink(escape_json(text))
        else:
            self._pieces.append(text)

    def close(self) -> None:
        self._sink('"' if self._types == STRING else as_json("".join(self._pieces), self._types))
