"""Guide and parser for requests with both tools and a `response_format`.

In the OpenAI API, the model may either call tools, or answer in the format of `response_format`.
Guided decoding starts with the first token, so one guide must allow both. An output has one of
three forms, which differ at the beginning:

- an answer, which is a JSON object;
- a list of calls, as in the module `forced`;
- a single call without a list, `{"name": ..., "arguments": {...}}`. Most models were trained to
  write a call in this form between tags, but the guide does not allow tags.

An answer and a call can be distinguished only if the answer's schema is an object with known
properties, and if no property is named `arguments` or `parameters`.

The guide makes the arguments of a call match the function's schema. If an engine does not support
all of these schemas, only those of `strict` functions are enforced. The arguments of all other
functions may then be any object. Such requests are not refused, because the clients did not ask for
strict arguments of these functions.

See decision 016 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.parsers.tools.events import Event
from gateway.parsers.tools.forced import (
    Schema,
    call_schema,
    calls_schema,
    move_arguments,
    move_references,
)
from gateway.parsers.tools.json_calls import JsonToolParser
from gateway.parsers.tools.parser import NotACall, Step, ToolParser

_ANY_OBJECT: Schema = {"type": "object", "additionalProperties": True}
_KEYS = ("arguments", "parameters")
"""Keys for the arguments of a call. Models were trained on one of these keys."""
_MORE = frozenset(
    {
        *("patternProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("$ref", "allOf", "anyOf", "oneOf", "if"),
    }
)
"""Keywords of a schema that may allow further properties of an object."""


@dataclass(frozen=True, slots=True)
class Either:
    """Format of an output that is either an answer or tool calls.

    `may_have_name` is True if an answer may have a property `name`. In this case, an object with
    this property is not necessarily a call.
    """

    may_have_name: bool

    @classmethod
    def beside(cls, schema: Any) -> Either | None:
        """Return the format for a request whose answers must match `schema`.

        Return None if tool calls cannot be distinguished from answers with this schema.
        """
        if not isinstance(schema, dict) or schema.get("type") != "object":
            return None
        # If `additionalProperties` is missing, it means False here. For schemas with `properties`,
        # engines allow no other properties by default.
        named, needed = schema.get("properties"), schema.get("required", [])
        closed = schema.get("additionalProperties", False) is False and _MORE.isdisjoint(schema)
        if not closed or not named or not isinstance(named, dict) or not isinstance(needed, list):
            return None
        names = [*named, *needed]
        return None if any(key in names for key in _KEYS) else cls("name" in names)

    @property
    def name(self) -> None:
        """The function that must be called: always None, since any function may be called."""

    def parser(self) -> ToolParser:
        return EitherToolParser(self.may_have_name)


def either_schema(
    answer: Schema,
    functions: Mapping[str, Schema | None],
    enforced: Collection[str],
    *,
    parallel: bool,
) -> str:
    """Return a JSON schema that allows either an answer or calls of the functions.

    Args:
        answer: the schema of an answer.
        functions: the schema of the parameters of each function, by name.
        enforced: the names of functions whose arguments must match their schema.
        parallel: True to allow several calls.

    Raises InvalidRequest if a schema is nested too deep.
    """
    what = "response_format: objects of the schema"
    defs = {"answer": move_references(answer, "#/$defs/answer", what, param="response_format")}
    calls: list[tuple[list[str], Schema]] = []
    if others := [name for name in functions if name not in enforced]:
        calls.append((others, _ANY_OBJECT))
    for index, name in enumerate(enforced):
        place = f"#/$defs/arguments{index}"
        defs[f"arguments{index}"] = move_arguments(name, functions[name], place)
        calls.append(([name], {"$ref": place}))
    for key in _KEYS:
        defs[f"call_with_{key}"] = {"anyOf": [call_schema(*each, key) for each in calls]}
    # Define the schema of a call only once, and refer to it. If a list may have 8 items, an engine
    # compiles the schema of its items 8 times. Without references, the compiled guide would be
    # large.
    one, other = [{"$ref": f"#/$defs/call_with_{key}"} for key in _KEYS]
    several = calls_schema([one], parallel=parallel)
    either = [{"$ref": "#/$defs/answer"}, several, one, other]
    return orjson.dumps({"anyOf": either, "$defs": defs}).decode()


class EitherToolParser(JsonToolParser):
    """Parser of outputs that match `either_schema`."""

    tagged = False

    def __init__(self, named: bool) -> None:
        super().__init__()
        self._named = named
        self._is_call = False

    def _run(self) -> Generator[None, str, None]:
        char = yield from self._gap((yield))
        self._is_call = char == "["
        if char in "[{":
            self._undecided = True
            self._hold(char)
            read = self._list if self._is_call else self._object
            char = yield from self._attempt(read((yield)))
        while True:
            char = yield from self._text(char, ())

    def _member(self, key: str, char: str) -> Step:
        # In a call, the name comes before the arguments. If the properties have another order, the
        # object is an answer.
        if self._undecided:
            if key not in (_KEYS if self._name is not None else ("name",)):
                raise NotACall(char)
            self._is_call |= not self._named
        return (yield from super()._member(key, char))

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Finish parsing. Drop an incomplete call whose arguments have not started.

        If the held-back text may also be an answer, it is reported as content instead.
        """
        if self._undecided and self._is_call:
            self._drop()
        return super().finish(cut=cut)
