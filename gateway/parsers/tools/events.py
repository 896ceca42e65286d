"""Parts of a choice's text, in the order in which it was generated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["complete", "malformed", "open"]
"""State of a call's arguments. `open` ones end within a string or before a closing bracket."""


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
    """The beginning of a tool call. `index` counts the calls of the choice from 0; `name` is
    complete.

    Parsers do not set `call_id`; the reader of the message does.
    """

    index: int
    name: str
    call_id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of the arguments of call `index`, a JSON object as text; never empty.

    The pieces of a complete call are the object as the model wrote it; those of a cut call are its
    beginning.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of call `index`; only a `complete` call may be executed.

    Parsers do not report ends. The reader of the message adds them.

    Attributes:
        index: the number of the call.
        state: the state of its arguments.
        arguments: all of its arguments, as they were reported.
        value: the JSON of the object that the arguments are; None if they are not an object.
    """

    index: int
    state: State
    arguments: str
    value: str | None


Event = Content | CallStart | CallArguments


class EventCollector:
    """Collector that merges neighbouring events of a kind, so that pieces do not depend on the
    caller."""

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
        """Return everything since the last call of this function."""
        self._close_piece()
        done, self._done = self._done, []
        return done

    def _close_piece(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if not text:
            return
        self._done.append(CallArguments(self.calls - 1, text) if self.in_call else Content(text))
