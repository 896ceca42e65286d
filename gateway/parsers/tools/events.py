"""Events of the parsers: content, reasoning and tool calls of a choice, in order of generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["complete", "malformed", "open"]
"""State of the arguments at the end of a tool call.

`complete` means that the arguments are a JSON object, or the complete text of a custom tool. `open`
means that a closing quote or bracket is missing. `malformed` means any other error.
"""


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of the message's content. The text is never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning. The text is never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a tool call. `index` is the call's number in the choice, from 0.

    `name` is the complete name of the function. Parsers do not set `call_id`; `MessageReader` does.
    """

    index: int
    name: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of the tool call with the number `index`. The text is never empty.

    The joined pieces of a complete call are a JSON object as written by the model, or the plain
    text for a custom tool. The pieces of an incomplete call are the beginning of such arguments.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of the tool call with the number `index`. Only a `complete` call may be executed.

    Parsers do not create this event; `MessageReader` does.

    Attributes:
        index: the number of the call.
        state: the state of the arguments.
        arguments: the text of all arguments, as they were reported.
        value: the arguments as valid JSON; None if they are not a JSON object.
    """

    index: int
    state: State
    arguments: str
    value: str | None


Event = Content | CallStart | CallArguments


class EventCollector:
    """Collector of a parser's events. Adjacent pieces of text are merged into one event.

    A parser may therefore add text in pieces of any size, such as single characters.
    """

    def __init__(self) -> None:
        self.calls = 0
        # True if the last added event belongs to a call.
        self.in_call = False
        self._done: list[Event] = []
        self._pieces: list[str] = []

    def content(self, text: str) -> None:
        if self.in_call:
            self._close_piece()
            self.in_call = False
        self._pieces.append(text)

    def start(self, name: str) -> None:
        self._close_piece()
        self._done.append(CallStart(self.calls, name))
        self.calls += 1
        self.in_call = True

    def arguments(self, text: str) -> None:
        """Add arguments to the last started call."""
        if not self.in_call:
            self._close_piece()
            self.in_call = True
        self._pieces.append(text)

    def take(self) -> list[Event]:
        """Return the events since the last call of this method."""
        self._close_piece()
        done, self._done = self._done, []
        return done

    def _close_piece(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if not text:
            return
        self._done.append(CallArguments(self.calls - 1, text) if self.in_call else Content(text))
