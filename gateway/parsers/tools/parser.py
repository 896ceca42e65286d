"""Base class of the parsers of tool calls.

A parser is a generator that receives one character per `send`. The result therefore does not depend
on the sizes of the chunks in which the text arrives. A parsing method (type `Step`) is called with
the first character of the text to parse. It returns the first character after that text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from typing import Any, ClassVar

from gateway.parsers.tools.events import Event, EventCollector

Step = Generator[None, str, str]
# The functions that a request offers. Each function's name maps to the JSON schema of its
# `parameters`, or to None if the function has no parameters.
Functions = Mapping[str, Mapping[str, Any] | None]


class NotACall(Exception):
    """The text is not a tool call.

    `char` is the first character that cannot be part of a call. The caller must parse `char` again,
    as the first character after the rejected text.
    """

    def __init__(self, char: str) -> None:
        super().__init__(char)
        self.char = char


class ToolParser(ABC):
    """Parser that splits one choice's text into content and tool calls.

    Text that may be the beginning of a call is held back. If the text turns out to be no call, the
    parser reports it unchanged as content. Whitespace between content and a call, and between
    calls, is dropped.

    `markers` are the tokens by which the parser recognizes calls. The detokenizer must output these
    tokens even if they are special tokens. `functions` are the functions that the request offers.
    Only formats that do not show the type of an argument need the functions' schemas.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    # True if calls are written between tags. A tag and a name then suffice to recognize a call.
    tagged: ClassVar[bool] = True

    def __init__(self, functions: Functions | None = None) -> None:
        self._events = EventCollector()
        # True while the text may be a call. The text is then in `_held`, and is reported as content
        # if it turns out to be no call.
        self._undecided = False
        self._held: list[str] = []
        # The function's name in a text that may be a call; None until the name is parsed.
        self._name: str | None = None
        self._machine = self._run()
        next(self._machine)

    @property
    def calls(self) -> int:
        """Number of calls that have started."""
        return self._events.calls

    def parse(self, text: str) -> list[Event]:
        """Parse the next chunk of text, and return its events.

        Text that may be the beginning of a call is held back until more text arrives.
        """
        send = self._machine.send
        for char in text:
            send(char)
        return self._events.take()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """Finish parsing. Return the events of text that was held back.

        `cut` is True if a token limit or a stop string ended the text, and False if the model ended
        it. Held-back text is reported as content. If `cut` is True, however, the beginning of a
        call is dropped. A call whose arguments have started remains incomplete.
        """
        self._machine.close()
        held = "".join(self._held)
        if not (cut and self._begins_call(held)) and not (self._events.in_call and held.isspace()):
            self._events.content(held)
        return self._events.take()

    def _begins_call(self, held: str) -> bool:
        """Return True if the held-back text can only be the beginning of a call, not content."""
        if not self._undecided:
            return False
        named = self.tagged and self._name is not None
        return named or held.lstrip().startswith(self._opening_tags())

    def _opening_tags(self) -> tuple[str, ...]:
        """Return the tags that always begin a call and never occur in content."""
        return self.markers

    @abstractmethod
    def _run(self) -> Generator[None, str, None]:
        """Parse the text. The generator receives one character per `send` and never ends."""

    def _hold(self, char: str) -> None:
        if self._undecided:
            self._held.append(char)

    def _commit(self, name: str) -> None:
        """Drop the held text, which is the markup of a call, and report the start of the call."""
        self._drop()
        self._events.start(name)

    def _release(self) -> None:
        """Report the held text as content.

        Whitespace at the end of this text remains held, because a call may follow.
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
        """Parse a possible call. If the text is no call, report the held text as content."""
        try:
            return (yield from reading)
        except NotACall as no:
            self._release()
            return no.char

    def _text(self, char: str, tags: tuple[str, ...]) -> Step:
        """Report content until one of the tags has been read completely. Return this tag.

        The tag and the whitespace before the tag remain held back. A failed match is not tried
        again from its second character. Tags such as `<a<b>` are therefore not supported.
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
        """Hold back whitespace, because it is content only if more content follows."""
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
