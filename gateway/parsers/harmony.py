"""Harmony, the form of gpt-oss: each message of an answer has a channel, and may have a recipient.

    <|channel|>analysis<|message|>It is about Paris.<|end|><|start|>assistant<|channel|>commentary
     to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

A message in the channel `analysis` is reasoning. A message with a recipient is a call; the header
may have the recipient before or after the channel. Other messages are content: those in the channel
`final`, and those in `commentary` without a recipient, which models write before calls. Several
messages of reasoning, or of content, are joined by newlines.

The text up to `<|message|>` is a message's header. It is markup. If an answer is cut within a
header, the answer ends before that header. If a model forgets `<|message|>`, the valid part of the
header is markup and the rest is text, so no word of the answer is lost.

Source: openai/harmony, docs/format.md; the chat template of gpt-oss.
"""

from __future__ import annotations

import re
from typing import Literal

from gateway.parsers.tools.events import CallArguments, CallStart, Content, Event, Reasoning

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _RETURN, _CALL)
"""Tokens that delimit the parts of a message. The text of a message never contains them."""

TURN = f"{_START}assistant"
"""The text by which a prompt begins the assistant's turn."""
FINAL = f"{_CHANNEL}final{_MESSAGE}"
"""The text after `TURN` that begins a message for the user."""

_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_MAX_MARKER_CHARS = max(map(len, MARKERS))
# A longer header is taken for text before which the model forgot `<|message|>`: a function's name
# has at most 128 characters.
_MAX_HEADER_CHARS = 256
_NAME_OF_CHANNEL = re.compile(rf"{re.escape(_CHANNEL)}\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_ROLE_OR_TYPE = re.compile(rf"(?:{re.escape(_START)}|{re.escape(_CONSTRAIN)})\s*\w*")
_CUT_RECIPIENT = re.compile(r"\bto?$")
_NAMESPACE = "functions."
# Recipients that are not functions: a message to one of them is not a call.
_NO_RECIPIENTS = frozenset({"", "all", "assistant", "user"})

_Kind = Literal["content", "reasoning", "call"]


def read_open_header(prompt: str) -> str:
    """Return the part of the answer's first header that ends the prompt; "" if there is none.

    The result ends with `<|message|>` if the prompt contains the complete header.
    """
    message = prompt[max(prompt.rfind(_START), 0) :]
    if not message.startswith(_START) or any(end in message for end in (_END, _RETURN, _CALL)):
        return ""
    header, found, _ = message.partition(_MESSAGE)
    return header + found


class HarmonyParser:
    """Parser of one choice's text, which may be cut anywhere.

    The interface is that of a `ToolParser`, but reasoning is reported, too. For speed, text is
    processed in pieces and not by character: every chat with such a model is parsed.
    """

    def __init__(self, open_header: str = TURN, *, calls: bool = True) -> None:
        """Start parsing.

        `open_header` is the part of the first message's header that is in the prompt. `calls` is
        False if no tools were offered. A call is then content, or reasoning if its channel is
        `analysis`.
        """
        self.calls = 0
        self._offered = calls
        self._events: list[Event | Reasoning] = []
        self._held = ""  # text that may be the beginning of a marker
        # The header so far; None within a message's text. `_bare` is True while the header has no
        # marker, so it may turn out to be text.
        self._header: str | None = ""
        self._bare = True
        self._kind: _Kind = "content"
        self._name = ""  # name of the called function
        self._silent = True  # the message has no text yet
        self._spoken: set[_Kind] = set()
        if _CHANNEL in open_header or open_header.endswith(_MESSAGE):
            self._header, self._bare = open_header.removesuffix(_MESSAGE), False
            if open_header.endswith(_MESSAGE):
                self._open()

    def parse(self, text: str) -> list[Event | Reasoning]:
        """Parse generated text; return the events that are certain by now."""
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
        """End the text; return the events of text that was held back. A cut call is not completed.

        `cut` has no effect here: a header is never content, however the text ended.
        """
        if self._header is None:
            # In a call, drop the held text: it is more likely a cut `<|call|>` than arguments.
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
        """Process text between markers."""
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
        """Begin the message of the current header; return the part of the header that is text."""
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
        """End a header without `<|message|>`; its part that is not header syntax is text."""
        if self._bare:
            text, self._header = self._header or "", ""
            self._open()
        else:
            text = self._open()
        self._write(text)

    def _close(self) -> None:
        """End the message."""
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
                # Report the call only with its first arguments, so a call always has arguments.
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
