"""Conversion of function calls to calls of custom tools in the answers of chats.

The model writes a custom tool's call as a function call with JSON arguments. The input in these
arguments is sent to the client at the end of the call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gateway.api.openai.custom_tools import arguments_to_input
from gateway.parsers.message import MessageEvent
from gateway.parsers.tools.events import CallArguments, CallEnd, CallStart, Event, Reasoning


@dataclass(frozen=True, slots=True)
class CustomStart:
    """The beginning of a call of a custom tool. `index` counts the calls of the choice from 0."""

    index: int
    name: str
    call_id: str


@dataclass(frozen=True, slots=True)
class CustomInput:
    """The input of the custom tool call with this `index`.

    If the output limit truncated the call, the input is truncated as well.
    """

    index: int
    text: str


ChatEvent = Event | Reasoning | CustomStart | CustomInput


class CustomCalls:
    """Converter of the custom tool calls of one choice. `names` are the custom tools' names."""

    __slots__ = ("_index", "_names")

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._index = -1

    def rewrite(self, events: Iterable[MessageEvent]) -> list[ChatEvent]:
        """Return the next events of the choice, with calls of custom tools converted.

        `CallEnd` events are removed for all calls.
        """
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
