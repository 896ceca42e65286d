"""Parser of tool calls between tags.

A `TaggedForm` describes a format: its tags, and the syntax of names and arguments. The class
`TaggedToolParser` parses all such formats. It accepts missing closing tags, and missing or extra
braces, because small models make these mistakes.

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
    """Syntax of a function's name, which comes before the arguments.

    Attributes:
        opening: the opening tag of the call, before the name.
        before: text between `opening` and the name.
        after: text after the name. If empty, the name ends before the first character that cannot
            be in a name.
        pattern: matches the text between `before` and `after`; the first group is the name.
    """

    opening: str
    before: str = ""
    after: str = ""
    pattern: re.Pattern[str] = re.compile("(.+)")


@dataclass(frozen=True)
class ParameterTags:
    """Syntax of arguments with tags around each key and each value.

    The module `value_ends` decides which tags end a value.

    Attributes:
        key: the tags before and after a key.
        value: the tags before and after a value.
        lines: True if line breaks surround each value. These line breaks do not belong to the
            value.
    """

    key: tuple[str, str]
    value: tuple[str, str]
    lines: bool = False


@dataclass(frozen=True)
class TaggedForm:
    """Description of a format of tool calls between tags. Calling the instance returns a parser.

    Attributes:
        openings: the tags that may begin a call.
        closings: the tags that may follow a call, in this order.
        name: the syntax of the function's name. None if a call is a JSON object with name and
            arguments, or a list of such objects.
        parameters: the syntax of the arguments after a `name`; None if they are a JSON object.
    """

    openings: tuple[str, ...]
    closings: tuple[str, ...] = ()
    name: Name | None = None
    parameters: ParameterTags | None = None

    @cached_property
    def markers(self) -> tuple[str, ...]:
        """All tags of the format that may be special tokens of a tokenizer."""
        tags = [*self.openings, *self.closings]
        if self.name is not None:
            tags += [self.name.before, self.name.after]
        if self.parameters is not None:
            tags += [*self.parameters.key, *self.parameters.value]
        return tuple(marker for tag in tags for marker in _TAG.findall(tag))

    @cached_property
    def value_ends(self) -> ValueEnds:
        """Recognizer of the tags that end a value. Use this only if `parameters` is not None."""
        assert self.parameters is not None
        opening, closing = self.parameters.key[0], self.parameters.value[1]
        lines = self.parameters.lines
        return ValueEnds(closing, opening, self.openings, self.closings, lines=lines)

    def __call__(self, functions: Functions | None = None) -> ToolParser:
        return TaggedToolParser(self, functions)


class TaggedToolParser(JsonToolParser):
    """Parser of the calls of one format.

    Only formats with `parameters` use the request's `functions`, to find each parameter's type.
    """

    def __init__(self, form: TaggedForm, functions: Functions | None = None) -> None:
        self._form = form
        self._functions = functions or {}
        self._types: dict[tuple[str, str], frozenset[str]] = {}
        # The value that is being parsed. `_tail` has the text after the value, as long as this text
        # may consist of the tags that end the value.
        self._open_value: _Value | None = None
        self._tail = ""
        # The opening tag of the next call, if it was read together with the end of the last value.
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
        """Parse a name with the text around it. Return the name and the next character."""
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
        """Finish parsing. Return the events of text that was held back.

        The text may end after a complete value, without the tag that ends the call. If the model
        ended the text, the call still counts as complete. If a limit or a stop string ended the
        text (`cut`), the call is incomplete, because the model might have written more parameters.
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
        """Parse a key and the tags before the value. Return the key."""
        key: list[str] = []
        end = form.key[1]
        while not (len(key) >= len(end) and "".join(key[-len(end) :]) == end):
            key.append((yield))
        if form.value[0]:
            char = yield from self._space((yield))
            yield from self._tag(char, (form.value[0],))
        return "".join(key[: -len(end)]).strip()

    def _read_typed(self, char: str, types: frozenset[str]) -> Generator[None, str, str]:
        """Parse a value and report it as JSON. Return the ending: the tags after the value.

        A string is reported while it is generated. Any other value is reported at its end.
        """
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
        """Parse one of the tags and return it. No tag may be a prefix of another tag.

        Unlike other parsing functions, this function does not consume the character after the tag.
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
    """Value of one parameter. The value is passed to `sink` as JSON.

    If the parameter's type is string, the text is passed on while it is generated. Any other value
    is passed on at its end, because its type is known only then.
    """

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
