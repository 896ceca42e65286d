"""Arguments of a tool call: repair of their Unicode escapes, and a check if they are complete.

Chat Completions, Responses and Messages use the same rule: a call is complete if its arguments are
a JSON object. The arguments of a custom tool may also be plain text. Such a call is complete if the
model itself ended the text, not a token limit or a stop string.
"""

from __future__ import annotations

import json
import re

import orjson

from gateway.parsers.tools.events import CallEnd, State

_TOKEN = re.compile(r'"|\\.|[{}\[\]]', re.DOTALL)

_HEX = "[0-9a-fA-F]"
_HIGH = rf"\\u[dD][89abAB]{_HEX}{{2}}"
_LOW = rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
# The group matches a lone surrogate. The pattern also matches complete pairs and other escapes, so
# that they are skipped. Otherwise `\\ud83d` (an escaped backslash and five letters) would be
# mistaken for half a pair.
_LONE_SURROGATE = re.compile(rf"{_HIGH}{_LOW}|({_HIGH}|{_LOW})|\\.", re.DOTALL)
_UNDECIDED = re.compile(rf"(?:{_HIGH})?\\(?:u{_HEX}{{0,3}})?|{_HIGH}")
_MAX_UNDECIDED_CHARS = 11


def end_call(index: int, arguments: str, *, custom: bool = False, cut: bool = False) -> CallEnd:
    """Return the event `CallEnd` of a call whose arguments have ended.

    Args:
        index: the number of the call.
        arguments: the complete text of the reported arguments.
        custom: True for a call of a custom tool.
        cut: True if a limit or a stop string ended the response. Plain text for a custom tool may
            then be incomplete, so the call gets the state `open`.
    """
    value = _read_object(arguments)
    state: State = "complete"
    if value is None:
        state = "open" if _is_unclosed(arguments) else "malformed"
        is_text = state == "malformed" or not arguments.lstrip().startswith("{")
        if custom and arguments and is_text:
            state = "open" if cut else "complete"
    return CallEnd(index, state, arguments, value)


def _read_object(arguments: str) -> str | None:
    """Return the arguments if they are a JSON object, otherwise None.

    NaN and Infinity, which are not JSON, are replaced by null.
    """
    try:
        return arguments if isinstance(orjson.loads(arguments), dict) else None
    except orjson.JSONDecodeError:
        pass
    try:
        found = json.loads(arguments)
        return orjson.dumps(found).decode() if isinstance(found, dict) else None
    except (ValueError, RecursionError, orjson.JSONEncodeError):
        return None


def _is_unclosed(arguments: str) -> bool:
    depth = 0
    quoted = False
    for token in _TOKEN.findall(arguments):
        if token == '"':
            quoted = not quoted
        elif not quoted and token in "{[":
            depth += 1
        elif not quoted and token in "}]":
            depth -= 1
    return quoted or depth > 0 or not arguments


class SurrogateRepair:
    """Repair of streamed JSON, which replaces each lone surrogate by U+FFFD.

    A lone surrogate is an escape for half of a UTF-16 surrogate pair, without the other half. JSON
    parsers refuse such an escape. If a chunk of text ends within an escape, at most 11 characters
    are held back until the next chunk. Arguments that are not an object, such as the text of a
    custom tool, are unchanged.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_object: bool | None = None

    def repair(self, piece: str) -> str:
        """Return the repaired text. Hold back an incomplete escape at the end of `piece`."""
        if self._is_object is None and piece and not piece.isspace():
            self._is_object = piece.lstrip().startswith("{")
        if not self._is_object or ("\\" not in piece and not self._held):
            return piece
        text = self._held + piece
        end = self._find_undecided(text)
        self._held = text[end:]
        return _LONE_SURROGATE.sub(_replace_escape, text[:end])

    def flush(self) -> str:
        """Return the text that was held back. Call this at the end of the arguments."""
        held, self._held = self._held, ""
        return _LONE_SURROGATE.sub(_replace_escape, held)

    @staticmethod
    def _find_undecided(text: str) -> int:
        """Return the index of an incomplete escape at the text's end, or the text's length."""
        end = len(text)
        start = text.find("\\", max(end - _MAX_UNDECIDED_CHARS, 0))
        while start >= 0:
            backslashes = start - len(text[:start].rstrip("\\"))
            if backslashes % 2 == 0 and _UNDECIDED.fullmatch(text, start):
                return start
            start = text.find("\\", start + 1)
        return end


def _replace_escape(escape: re.Match[str]) -> str:
    return "\\ufffd" if escape[1] else escape[0]
