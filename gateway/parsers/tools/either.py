"""Calls, or an answer in a format: what tools beside a `response_format` ask for.

At OpenAI a model decides between the two. A guide holds from the answer's first token on, so it has
to allow either, told apart by how they begin: a list of calls, as a forced choice has it, where the
answer is an object; and one call without a list, `{"name": ..., "arguments": {...}}`, as most
models were taught to write within their tags, which the guide does not let them begin with. That
one is allowed only where no answer can have `arguments` or `parameters`.

Arguments are held to the functions' schemas, or to those of `strict` ones alone where an engine
cannot enforce one of the others: that is no reason to refuse what nobody was promised.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.parsers.tools.events import Event
from gateway.parsers.tools.forced import Schema, call, calls_list, moved, moved_arguments
from gateway.parsers.tools.json_calls import JsonToolParser
from gateway.parsers.tools.parser import NotACall, Step, ToolParser

_ANY_OBJECT: Schema = {"type": "object", "additionalProperties": True}
_KEYS = ("arguments", "parameters")
"""Models were taught one or the other."""
_MORE = frozenset(
    {
        *("patternProperties", "dependentRequired", "dependentSchemas", "dependencies"),
        *("$ref", "allOf", "anyOf", "oneOf", "if"),
    }
)
"""What may say more of an object's properties."""


@dataclass(frozen=True, slots=True)
class Either:
    """How to read an answer that may be calls.

    `bare` says that one may stand without a list, `named` that answers may have a `name` as well.
    """

    bare: bool = False
    named: bool = False

    @classmethod
    def beside(cls, schema: Any) -> Either | None:
        """Beside answers of this schema; None where calls could not be told from them."""
        if not isinstance(schema, dict) or schema.get("type") != "object":
            return None
        # An object that names properties and says nothing of others has no others (`guides`).
        named, others = schema.get("properties"), schema.get("additionalProperties", False)
        if not named or others is not False or not _MORE.isdisjoint(schema):
            return cls()
        names = {*named, *schema.get("required", ())}
        return cls(bare=True, named="name" in names) if names.isdisjoint(_KEYS) else cls()

    @property
    def name(self) -> None:
        """That of the one function which may be called: any may."""

    def parser(self) -> ToolParser:
        return EitherToolParser(self)

    def guide(
        self,
        schema: Schema,
        functions: Mapping[str, Schema | None],
        held: Collection[str],
        *,
        parallel: bool,
    ) -> str:
        """The JSON schema of an answer of `schema`, or of calls of the functions.

        `functions` maps names to `parameters`; of those in `held` they hold. Raises
        InvalidRequest if a schema refers to another document.
        """
        what = "response_format: objects of the schema"
        defs = {"answer": moved(schema, "#/$defs/answer", what, param="response_format")}
        calls: list[tuple[list[str], Schema]] = []
        if others := [name for name in functions if name not in held]:
            calls.append((others, _ANY_OBJECT))
        for index, name in enumerate(held):
            place = f"#/$defs/arguments{index}"
            defs[f"arguments{index}"] = moved_arguments(name, functions[name], place)
            calls.append(([name], {"$ref": place}))
        either: list[Schema] = [{"$ref": "#/$defs/answer"}]
        either.append(calls_list([call(*each) for each in calls], parallel=parallel))
        if self.bare:
            either += [call(*each, key) for key in _KEYS for each in calls]
        return orjson.dumps({"anyOf": either, "$defs": defs}).decode()


class EitherToolParser(JsonToolParser):
    """Parses what the guide of `Either` allows."""

    tagged = False

    def __init__(self, either: Either) -> None:
        super().__init__()
        self._either = either
        self._listed = False

    def _run(self) -> Generator[None, str, None]:
        char = yield from self._gap((yield))
        self._listed = char == "["
        if self._listed or (char == "{" and self._either.bare):
            self._undecided = True
            self._hold(char)
            read = self._list if self._listed else self._object
            char = yield from self._attempt(read((yield)))
        while True:
            char = yield from self._text(char, ())

    def _member(self, key: str, char: str) -> Step:
        # A call has its name before all else, and its arguments behind that.
        if self._undecided and key not in (_KEYS if self._name is not None else ("name",)):
            raise NotACall(char)
        return (yield from super()._member(key, char))

    def finish(self) -> list[Event]:
        """What was cut is a call as far as it is known, unless it may be an answer."""
        if self._undecided and (self._listed or not self._either.named):
            if self._name is not None:
                self._commit(self._name)
            elif self._listed:
                self._drop()
        return super().finish()
