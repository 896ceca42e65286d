"""Events of a parser: the parts of a choice's text, in the order of generation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["complete", "malformed", "open"]
"""State of a call's arguments. `open` means that they end within a string or before a closing
bracket."""


@dataclass(frozen=True, slots=True)
class Content:
    """The next piece of the message's content; never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The next piece of the reasoning; never empty."""

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
    """The next piece of the arguments of call `index`; never empty.

    Joined, the pieces of a complete call are a JSON object, as the model wrote it. The pieces of a
    cut call are the beginning of such an object.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of call `index`; only a `complete` call may be executed.

    Parsers do not report the ends of calls; `MessageReader` does.

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
    """Collector of a parser's events. Text of the same kind is merged until `take` is called.

    So events do not depend on the pieces in which the parser reports text.
    """

    def __init__(self) -> None:
        self.calls = 0
        # True if the last generated part was a call.
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
