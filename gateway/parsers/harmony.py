"""Parser of harmony, the response format of gpt-oss.

A response consists of messages. Each message has a channel, and may have a recipient:

    <|channel|>analysis<|message|>It is about Paris.<|end|><|start|>assistant<|channel|>commentary
     to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>

A message in the channel `analysis` is reasoning. A message with a recipient is a tool call; the
recipient may be before or after the channel. All other messages are content: messages in the
channel `final`, and messages in `commentary` without a recipient, which models write before tool
calls. The texts of several reasoning messages are joined by newlines. The same applies to content
messages.

The header of a message is the text up to `<|message|>`. Clients do not get the header's text. If
the token limit cuts a response within a header, the response ends before this header. If a model
forgets `<|message|>`, the parser removes the valid header syntax. The rest of the header becomes
the text of the message.

Source: openai/harmony, docs/format.md; the chat template of gpt-oss.
"""

from __future__ import annotations

import re
from typing import Literal

from gateway.parsers.tools.events import CallArguments, CallStart, Content, Event, Reasoning

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _RETURN, _CALL)
"""Control tokens of the format. The text of a message never contains these tokens."""

TURN = f"{_START}assistant"
"""Start of the assistant's next message. A prompt that asks for a response ends with this text."""
FINAL = f"{_CHANNEL}final{_MESSAGE}"
"""Text after `TURN` that completes the header of a message in the channel `final`."""

_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_MAX_MARKER_CHARS = max(map(len, MARKERS))
# Maximum number of characters in a header. If a header is longer, the model has forgotten
# `<|message|>`, and has started to write the message's text. A valid header is shorter, because the
# name of a function has at most 128 characters.
_MAX_HEADER_CHARS = 256
_NAME_OF_CHANNEL = re.compile(rf"{re.escape(_CHANNEL)}\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]*)")
_ROLE_OR_TYPE = re.compile(rf"(?:{re.escape(_START)}|{re.escape(_CONSTRAIN)})\s*\w*")
_CUT_RECIPIENT = re.compile(r"\bto?$")
_NAMESPACE = "functions."
# Recipients that are not functions. A message to such a recipient is not a call.
_NO_RECIPIENTS = frozenset({"", "all", "assistant", "user"})

_Kind = Literal["content", "reasoning", "call"]


def read_open_header(prompt: str) -> str:
    """Return the header of the unfinished harmony message at the end of a prompt.

    The response continues this message. If the header itself is complete, the result ends with
    `<|message|>`. Return "" if the prompt does not end with an unfinished message.
    """
    message = prompt[max(prompt.rfind(_START), 0) :]
    if not message.startswith(_START) or any(end in message for end in (_END, _RETURN, _CALL)):
        return ""
    header, found, _ = message.partition(_MESSAGE)
    return header + found


class HarmonyParser:
    """Incremental parser of one choice's text. The text may arrive in chunks of any length.

    The class has the same methods as `ToolParser`, and also reports reasoning. `ToolParser`
    processes single characters. This parser processes chunks, which is faster. Speed is important,
    because every response of a harmony model must be parsed, even if the request offers no tools.
    """

    def __init__(self, open_header: str = TURN, *, calls: bool = True) -> None:
        """Start parsing.

        Args:
            open_header: the beginning of the first message's header, as `read_open_header` returns
                it for the prompt.
            calls: False if the request offers no tools. A tool call is then reported as content, or
                as reasoning if its channel is `analysis`.
        """
        self.calls = 0
        self._offered = calls
        self._events: list[Event | Reasoning] = []
        self._held = ""  # text that may be the beginning of a marker
        # The part of the header that was read so far; None within a message's text.
        self._header: str | None = ""
        # True while the header contains no marker. Without a marker, the text in `_header` may be
        # content of a message without a header.
        self._bare = True
        self._kind: _Kind = "content"
        self._name = ""  # name of the called function
        self._silent = True  # True until the message has text
        self._spoken: set[_Kind] = set()
        if _CHANNEL in open_header or open_header.endswith(_MESSAGE):
            self._header, self._bare = open_header.removesuffix(_MESSAGE), False
            if open_header.endswith(_MESSAGE):
                self._open()

    def parse(self, text: str) -> list[Event | Reasoning]:
        """Parse the next chunk of text, and return its events.

        Text that may be the beginning of a marker is held back until more text arrives.
        """
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
        """Finish parsing. Return the events of text that was held back.

        An unfinished tool call stays incomplete. `cut` has no effect here: the parameter exists
        because `ToolParser.finish` has it.
        """
        if self._header is None:
            # In a tool call, drop the held-back text, because it is probably the beginning of
            # `<|call|>`.
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
        """Process text between two markers: a part of a header or of a message's text."""
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
        """Start the text of the current message, whose header has just ended.

        Return the text in the header that is not header syntax. This is message text if the model
        has forgotten `<|message|>`.
        """
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
        """Handle a header that ended without `<|message|>`.

        Text that is not header syntax becomes the text of the message.
        """
        if self._bare:
            text, self._header = self._header or "", ""
            self._open()
        else:
            text = self._open()
        self._write(text)

    def _close(self) -> None:
        """End the current message. Report `{}` as the arguments of a tool call without text."""
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
                # Report the start of a call together with its first arguments, so that no call is
                # reported without arguments.
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
