"""Base of the forms' parsers: a character-by-character machine that holds back undecided text.

A parser is a generator that is sent one character at a time. So the result cannot depend on how the
text was cut, and a form reads like its grammar. Parsing functions take the first character that is
not consumed and return the next one (`Step`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

from gateway.parsers.tools.events import Event, EventCollector

Step = Generator[None, str, str]
# The functions that a request offers: `parameters`, a JSON schema or None, by name.
Functions = Mapping[str, Mapping[str, Any] | None]


class NotACall(Exception):
    """The text is not a call (or no longer one); `char` has not been consumed."""

    def __init__(self, char: str) -> None:
        super().__init__(char)
        self.char = char


class ToolParser(ABC):
    """Splits one choice's text into content and tool calls.

    Content is emitted as soon as it cannot begin a call. Whitespace between content and a call, and
    between calls, is dropped; text that looked like a call and is not is emitted unchanged.

    `markers` are the tokens that the form is recognized by and that tokenizers may list as special:
    detokenizing must not skip them. `functions` are for the forms in which a value's type is known
    from its schema alone.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    # A call within tags is certain as soon as its name is known.
    tagged: ClassVar[bool] = True

    def __init__(self, functions: Functions | None = None) -> None:
        self._events = EventCollector()
        # While undecided, all text is held: it is content if it turns out not to be a call.
        self._undecided = False
        self._held: list[str] = []
        # The name of the undecided call, once it has been read.
        self._name: str | None = None
        self._machine = self._run()
        next(self._machine)

    @property
    def calls(self) -> int:
        """Return how many calls have begun."""
        return self._events.calls

    def parse(self, text: str) -> list[Event]:
        """Parse generated text, cut anywhere; return the events that became certain."""
        send = self._machine.send
        for char in text:
            send(char)
        return self._events.take()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """End the text and return what was held back. A call that was cut stays cut.

        `cut` is True if a limit or a stop string ended the text. The markup of a call whose
        arguments have not begun is then dropped. If the model ended the text, the markup is
        content.
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
        """Return the tags that content never begins with."""
        return self.markers

    @abstractmethod
    def _run(self) -> Generator[None, str, None]:
        """Parse the form: receive characters for ever."""

    def _hold(self, char: str) -> None:
        if self._undecided:
            self._held.append(char)

    def _commit(self, name: str) -> None:
        """Decide for a call: the held text is markup."""
        self._drop()
        self._events.start(name)

    def _release(self) -> None:
        """Decide against a call: the held text is content, up to whitespace that a call may
        follow."""
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
        """Parse a possible call; if it is none, release the held text."""
        try:
            return (yield from reading)
        except NotACall as no:
            self._release()
            return no.char

    def _text(self, char: str, tags: tuple[str, ...]) -> Step:
        """Pass content on until one of the tags is complete; return that tag.

        The tag and the whitespace before it are then held, undecided. The first character of a tag
        must not occur again in any of them.
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
        """Skip whitespace that is content only if more content follows."""
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
