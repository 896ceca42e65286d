"""Calls, or an answer in a format, for requests with both tools and a `response_format`.

At OpenAI a model decides between the two. A guide applies from the answer's first token on, so it
has to allow both, distinguished by their beginning: the answer, which is an object; a list of
calls, as in a forced choice; or one call without a list, `{"name": ..., "arguments": {...}}`, as
most models were taught to write within tags, which the guide does not let them write. So this works
for formats whose object has known properties, without `arguments` and `parameters` among them.

Arguments must match the functions' schemas. If an engine cannot enforce one of them, only those of
`strict` functions must match: no client was promised the others, so they are no reason for a
refusal.

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
"""Keys of arguments; models were taught one or the other."""
_MORE = frozenset(
    {
        *("patternProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("$ref", "allOf", "anyOf", "oneOf", "if"),
    }
)
"""Keywords that may add properties of an object."""


@dataclass(frozen=True, slots=True)
class Either:
    """The form of an answer that may be calls. `may_have_name` says that answers may have a `name`,
    too."""

    may_have_name: bool

    @classmethod
    def beside(cls, schema: Any) -> Either | None:
        """Return the form for answers of this schema; None if calls could not be distinguished from
        them."""
        if not isinstance(schema, dict) or schema.get("type") != "object":
            return None
        # An object with properties and without `additionalProperties` has no others (`guides`).
        named, needed = schema.get("properties"), schema.get("required", [])
        closed = schema.get("additionalProperties", False) is False and _MORE.isdisjoint(schema)
        if not closed or not named or not isinstance(named, dict) or not isinstance(needed, list):
            return None
        names = [*named, *needed]
        return None if any(key in names for key in _KEYS) else cls("name" in names)

    @property
    def name(self) -> None:
        """Always None: any function may be called."""

    def parser(self) -> ToolParser:
        return EitherToolParser(self.may_have_name)


def either_schema(
    answer: Schema,
    functions: Mapping[str, Schema | None],
    enforced: Collection[str],
    *,
    parallel: bool,
) -> str:
    """Return the JSON schema of an answer of the schema `answer`, or of calls of the functions.

    `functions` maps names to parameter schemas. Schemas of names in `enforced` are enforced. Raises
    InvalidRequest if a schema is nested too deep.
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
    # By reference: engines expand a counted schema as often as it may occur.
    one, other = [{"$ref": f"#/$defs/call_with_{key}"} for key in _KEYS]
    several = calls_schema([one], parallel=parallel)
    either = [{"$ref": "#/$defs/answer"}, several, one, other]
    return orjson.dumps({"anyOf": either, "$defs": defs}).decode()


class EitherToolParser(JsonToolParser):
    """Parser of what `either_schema` allows."""

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
        # A call has its name first, and its arguments after that.
        if self._undecided:
            if key not in (_KEYS if self._name is not None else ("name",)):
                raise NotACall(char)
            self._is_call |= not self._named
        return (yield from super()._member(key, char))

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Drop a call whose arguments have not begun, unless it may be an answer."""
        if self._undecided and self._is_call:
            self._drop()
        return super().finish(cut=cut)
