"""Base class of the parsers of tool calls: text is parsed by character and held back if undecided.

A parser is a generator that is sent one character at a time. So the result cannot depend on how the
text was cut, and the code of a parser reads like a grammar. A parsing function (`Step`) takes the
first character of its part and returns the first character after its part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

from gateway.parsers.tools.events import Event, EventCollector

Step = Generator[None, str, str]
# The functions that a request offers: the JSON schema of their `parameters`, or None, by name.
Functions = Mapping[str, Mapping[str, Any] | None]


class NotACall(Exception):
    """The text is not a call. `char` is the character at which this became clear; it is not
    consumed."""

    def __init__(self, char: str) -> None:
        super().__init__(char)
        self.char = char


class ToolParser(ABC):
    """Parser that splits one choice's text into content and tool calls.

    Text is emitted as content as soon as it cannot be the beginning of a call. Whitespace between
    content and a call, and between calls, is dropped. Text that looked like a call but is none is
    emitted unchanged.

    `markers` are the tokens by which calls are recognized. Tokenizers may list them as special, but
    detokenizing must not skip them. `functions` are needed only for forms in which the type of a
    value is stated by the function's schema alone.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    # True if calls are written within tags: text is then a call as soon as the name is known.
    tagged: ClassVar[bool] = True

    def __init__(self, functions: Functions | None = None) -> None:
        self._events = EventCollector()
        # True while the text may be a call. It is then held, and becomes content if it is no call.
        self._undecided = False
        self._held: list[str] = []
        # The name of the undecided call, once it has been read.
        self._name: str | None = None
        self._machine = self._run()
        next(self._machine)

    @property
    def calls(self) -> int:
        """Return the number of calls that have started."""
        return self._events.calls

    def parse(self, text: str) -> list[Event]:
        """Parse generated text, cut anywhere; return the events that are certain by now."""
        send = self._machine.send
        for char in text:
            send(char)
        return self._events.take()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """End the text; return the events of text that was held back. A cut call is not completed.

        `cut` is True if a limit or a stop string ended the text. If a call's arguments have not
        started, its markup is then dropped. If the model ended the text, such markup is content.
        """
        self._machine.close()
        held = "".join(self._held)
        if not (cut and self._begins_call(held)) and not (self._events.in_call and held.isspace()):
            self._events.content(held)
        return self._events.take()

    def _begins_call(self, held: str) -> bool:
        """Return True if the held text can only be the beginning of a call."""
        if not self._undecided:
            return False
        named = self.tagged and self._name is not None
        return named or held.lstrip().startswith(self._opening_tags())

    def _opening_tags(self) -> tuple[str, ...]:
        """Return the tags with which only a call begins, never content."""
        return self.markers

    @abstractmethod
    def _run(self) -> Generator[None, str, None]:
        """Parse the text: a generator that is sent one character at a time and never ends."""

    def _hold(self, char: str) -> None:
        if self._undecided:
            self._held.append(char)

    def _commit(self, name: str) -> None:
        """Decide that the held text is the markup of a call, and report the start of the call."""
        self._drop()
        self._events.start(name)

    def _release(self) -> None:
        """Decide that the held text is content.

        Whitespace at its end remains held, since a call may follow.
        """
        held = "".join(self._held)
        content = held.rstrip()
        self._drop()
        if content:
            self._events.content(content)
        if content != held:
            self._held.append(held[len(content) :])

    def _drop(self) -> None:
        self._held.clear()
        self._undecided = False
        self._name = None

    def _attempt(self, reading: Step) -> Step:
        """Parse a possible call; if the text is no call, release the held text as content."""
        try:
            return (yield from reading)
        except NotACall as no:
            self._release()
            return no.char

    def _text(self, char: str, tags: tuple[str, ...]) -> Step:
        """Emit content until one of the tags is complete; return that tag.

        The tag and the whitespace before it are then held as undecided. The first character of a
        tag must not occur again in any of the tags.
        """
        first = {tag[0] for tag in tags}
        partial = ""
        while True:
            if (partial or char in first) and any(t.startswith(partial + char) for t in tags):
                partial += char
                self._held.append(char)
                if partial in tags:
                    self._undecided = True
                    return partial
            elif partial:
                partial = ""
                self._release()
                continue
            elif char.isspace():
                self._held.append(char)
            else:
                if self._held:
                    char = "".join(self._held) + char
                    self._held.clear()
                self._events.content(char)
            char = yield

    def _gap(self, char: str) -> Step:
        """Hold whitespace, which is content only if more content follows."""
        while char.isspace():
            self._held.append(char)
            char = yield
        return char

    def _space(self, char: str) -> Step:
        """Skip whitespace within a call's markup."""
        while char in " \t\n\r":
            self._hold(char)
            char = yield
        return char
