"""Calls of custom tools in chats: a call's arguments are collected, and go out as one input."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from gateway.api.custom_tools import arguments_to_input
from gateway.parsers.message import MessageEvent
from gateway.parsers.tools.events import CallArguments, CallStart


@dataclass(frozen=True, slots=True)
class CustomStart:
    """A call of a custom tool begins."""

    index: int
    name: str
    call_id: str


@dataclass(frozen=True, slots=True)
class CustomInput:
    """The complete input of the call `index`."""

    index: int
    text: str


ChatEvent = MessageEvent | CustomStart | CustomInput


class CustomCalls:
    """Rewrites the events of one choice; `names` are those of custom tools."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._index = -1
        self._arguments: list[str] = []

    def rewrite(self, events: Iterable[MessageEvent], *, last: bool) -> list[ChatEvent]:
        """Return the events with inputs in place of arguments; `last` ends the choice."""
        found: list[ChatEvent] = []
        for event in events:
            if isinstance(event, CallArguments) and event.index == self._index:
                self._arguments.append(event.text)
                continue
            found += self._end()
            if isinstance(event, CallStart) and event.name in self._names:
                self._index = event.index
                found.append(CustomStart(event.index, event.name, event.call_id))
            else:
                found.append(event)
        return found + self._end() if last else found

    def _end(self) -> list[ChatEvent]:
        index, self._index = self._index, -1
        text = arguments_to_input("".join(self._arguments)) if self._arguments else ""
        self._arguments.clear()
        return [CustomInput(index, text)] if index >= 0 and text else []


def with_custom_calls(calls: list[dict[str, Any]], names: Collection[str]) -> list[dict[str, Any]]:
    """Return the calls of a complete message, with those of the tools `names` in their form."""
    return [
        {
            "id": call["id"],
            "type": "custom",
            "custom": {
                "name": call["function"]["name"],
                "input": arguments_to_input(call["function"]["arguments"] or "{}"),
            },
        }
        if call["function"]["name"] in names
        else call
        for call in calls
    ]
