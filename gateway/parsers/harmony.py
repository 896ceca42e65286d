"""Harmony, the form of gpt-oss: each message of an answer says its channel, and whom it is for.

    <|channel|>analysis<|message|>It is about Paris.<|end|><|start|>assistant<|channel|>commentary
     to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

`analysis` is reasoning. A message to a recipient is a call; the recipient may stand before the
channel as well. All else is content: `final`, and `commentary` to nobody, which comes before calls.
A newline parts messages of one kind.

A header is markup. What is cut within one ends there; what no `<|message|>` follows is read as far
as it is a header, and the rest is text: a model that forgets a marker loses no word of its answer.

Source: openai/harmony, docs/format.md; the chat template of gpt-oss.
"""

from __future__ import annotations

import re
from typing import Literal

from gateway.parsers.tools.events import CallArguments, CallStart, Content, Event, Reasoning

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _RETURN, _CALL)
"""Tokens of the form. None of them is ever part of a message's text."""

TURN = f"{_START}assistant"
"""How a prompt begins the assistant's turn."""
FINAL = f"{_CHANNEL}final{_MESSAGE}"
"""Begins, behind `TURN`, what is for the user."""

_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_MAX_MARKER_CHARS = max(map(len, MARKERS))
# More is no header, but text whose `<|message|>` was forgotten: names have up to 128 characters.
_MAX_HEADER_CHARS = 256
_NAME_OF_CHANNEL = re.compile(rf"{re.escape(_CHANNEL)}\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_ROLE_OR_TYPE = re.compile(rf"(?:{re.escape(_START)}|{re.escape(_CONSTRAIN)})\s*\w*")
_CUT_RECIPIENT = re.compile(r"\bto?$")
_NAMESPACE = "functions."
# To these it is a message as any other.
_NO_RECIPIENTS = frozenset({"", "all", "assistant", "user"})

_Kind = Literal["content", "reasoning", "call"]


def read_open_header(prompt: str) -> str:
    """What a prompt has written of the header of the answer's first message, its end included."""
    message = prompt[max(prompt.rfind(_START), 0) :]
    if not message.startswith(_START) or any(end in message for end in (_END, _RETURN, _CALL)):
        return ""
    header, found, _ = message.partition(_MESSAGE)
    return header + found


class HarmonyParser:
    """Reads one choice, cut anywhere, as a `ToolParser` does, but for its reasoning as well.

    It goes by whole pieces of text, not by characters: every chat with such a model is read.
    """

    def __init__(self, open_header: str = TURN, *, calls: bool = True) -> None:
        """`begun` is what the prompt has of the first message's header. With `calls` False a call
        is content, or reasoning by its channel: no tools were offered."""
        self.calls = 0
        self._offered = calls
        self._events: list[Event | Reasoning] = []
        self._held = ""  # may begin a marker
        # None within a message's text. While `_bare` no marker has begun it: text may follow.
        self._header: str | None = ""
        self._bare = True
        self._kind: _Kind = "content"
        self._name = ""  # of the function that is called
        self._silent = True  # the message has no text yet
        self._spoken: set[_Kind] = set()
        if _CHANNEL in open_header or open_header.endswith(_MESSAGE):
            self._header, self._bare = open_header.removesuffix(_MESSAGE), False
            if open_header.endswith(_MESSAGE):
                self._open()

    def parse(self, text: str) -> list[Event | Reasoning]:
        """Consumes generated text; returns the events that became certain."""
        text = self._held + text
        start = 0
        for found in _MARKER.finditer(text):
            self._read(text[start : found.start()])
            self._mark(found[0])
            start = found.end()
        tail = text.rfind("<", max(start, len(text) - _MAX_MARKER_CHARS + 1))
        if tail < 0 or not any(marker.startswith(text[tail:]) for marker in MARKERS):
            tail = len(text)
        self._read(text[start:tail])
        self._held = text[tail:]
        return self._take()

    def finish(self, *, cut: bool = False) -> list[Event | Reasoning]:
        """Ends the text: returns what was held back. A call that was cut stays cut.

        `cut` changes nothing here: a header is no content, whatever ended it.
        """
        if self._header is None:
            # In a call it is the marker of the call's end, which was cut, sooner than arguments.
            if self._kind != "call":
                self._write(self._held)
        elif self._bare:
            self._header += self._held
            if not self._header.isspace():
                self._miss_message()
        elif not _RECIPIENT.search(self._header):
            self._header = _CUT_RECIPIENT.sub("", self._header)
            self._miss_message()
        return self._take()

    def _take(self) -> list[Event | Reasoning]:
        done, self._events = self._events, []
        return done

    def _mark(self, marker: str) -> None:
        header = self._header
        if marker == _MESSAGE:
            if header is not None:
                self._open()
        elif marker == _CONSTRAIN or (marker == _CHANNEL and _CHANNEL not in (header or marker)):
            if header is not None:
                self._header, self._bare = header + marker, False
        else:
            self._close()
            if marker in (_START, _CHANNEL):
                self._header, self._bare = marker, False

    def _read(self, text: str) -> None:
        """Takes text between markers."""
        if self._header is None:
            self._write(text)
            return
        free_chars = _MAX_HEADER_CHARS - len(self._header)
        self._header += text[:free_chars]
        is_text = self._bare and not "to=".startswith(self._header.lstrip()[:3])
        if is_text or len(text) > free_chars:
            self._miss_message()
            self._write(text[free_chars:])

    def _open(self) -> str:
        """Begins the message that the header is of; returns what of the header is no such thing."""
        header, self._header = self._header or "", None
        channel, recipient = _NAME_OF_CHANNEL.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix(_NAMESPACE) if recipient else ""
        self._silent = True
        self._kind = "reasoning" if channel and channel[1] == "analysis" else "content"
        if self._offered and name not in _NO_RECIPIENTS:
            self._kind, self._name = "call", name
        for part in (_NAME_OF_CHANNEL, _RECIPIENT, _ROLE_OR_TYPE):
            header = part.sub("", header)
        return header.lstrip()

    def _miss_message(self) -> None:
        """The header ends without its marker: what is no header is the message's text."""
        if self._bare:
            text, self._header = self._header or "", ""
            self._open()
        else:
            text = self._open()
        self._write(text)

    def _close(self) -> None:
        """Ends the message."""
        if self._header and not self._header.isspace():
            self._miss_message()
        if self._header is None and self._kind == "call" and self._silent:
            self._write("{}")
        self._header, self._bare = "", True

    def _write(self, text: str) -> None:
        if not text:
            return
        if self._kind == "call":
            if self._silent:
                # Reported with its arguments, which are so never empty.
                self._events.append(CallStart(self.calls, self._name))
                self.calls += 1
            self._events.append(CallArguments(self.calls - 1, text))
        else:
            if self._silent and self._kind in self._spoken:
                text = "\n" + text
            kind = Reasoning if self._kind == "reasoning" else Content
            self._events.append(kind(text))
        self._spoken.add(self._kind)
        self._silent = False
