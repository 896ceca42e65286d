"""Calls of custom tools in chats: the arguments are collected and sent as one input."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gateway.api.openai.custom_tools import arguments_to_input
from gateway.parsers.message import MessageEvent
from gateway.parsers.tools.events import CallArguments, CallEnd, CallStart, Event, Reasoning


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


ChatEvent = Event | Reasoning | CustomStart | CustomInput


class CustomCalls:
    """Rewrites the events of one choice; `names` are those of custom tools."""

    __slots__ = ("_index", "_names")

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._index = -1

    def rewrite(self, events: Iterable[MessageEvent]) -> list[ChatEvent]:
        """Return the events with inputs instead of arguments, and without the ends of calls."""
        found: list[ChatEvent] = []
        for event in events:
            if isinstance(event, CallStart) and event.name in self._names:
                self._index = event.index
                found.append(CustomStart(event.index, event.name, event.call_id))
            elif isinstance(event, CallEnd):
                is_custom = event.index == self._index
                if is_custom and (text := arguments_to_input(event.arguments)):
                    found.append(CustomInput(event.index, text))
            elif not isinstance(event, CallArguments) or event.index != self._index:
                found.append(event)
        return found
