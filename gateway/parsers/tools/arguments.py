"""Arguments of a call: their state after the end, and their repair while they are streamed.

One rule serves chat, Responses and Messages: a call is complete if its arguments are a JSON object.
A custom tool's call is also complete if its text is the input itself and the model ended it.
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
# A complete pair and any other escape match first, so that `\\ud83d` stays a backslash and five
# letters.
_LONE_SURROGATE = re.compile(rf"{_HIGH}{_LOW}|({_HIGH}|{_LOW})|\\.", re.DOTALL)
_UNDECIDED = re.compile(rf"(?:{_HIGH})?\\(?:u{_HEX}{{0,3}})?|{_HIGH}")
_MAX_UNDECIDED_CHARS = 11


def end_call(index: int, arguments: str, *, custom: bool = False, cut: bool = False) -> CallEnd:
    """Return the end event of a call without further arguments.

    Args:
        index: the number of the call.
        arguments: the text of the call, as it was reported.
        custom: the call is of a custom tool.
        cut: a limit or a stop string ended the answer. Plain text does not show whether it is
            complete, so such an input is `open`.
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
    """Return the JSON of the object that the arguments are, or None if they are anything else.

    NaN and Infinity, which are not JSON, become null. Other text is returned unchanged.
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
    """Replaces half a surrogate pair, which no JSON reader accepts, by U+FFFD in a streamed object.

    Escapes that are cut by the end of a piece are held back: 11 characters at most. Arguments that
    are not an object, such as the text of a custom tool, are unchanged.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_object: bool | None = None

    def repair(self, piece: str) -> str:
        """Return the repaired text that is certain after this piece."""
        if self._is_object is None and piece and not piece.isspace():
            self._is_object = piece.lstrip().startswith("{")
        if not self._is_object or ("\\" not in piece and not self._held):
            return piece
        text = self._held + piece
        end = self._find_undecided(text)
        self._held = text[end:]
        return _LONE_SURROGATE.sub(_replace_escape, text[:end])

    def flush(self) -> str:
        """Return the held text of arguments that end within an escape."""
        held, self._held = self._held, ""
        return _LONE_SURROGATE.sub(_replace_escape, held)

    @staticmethod
    def _find_undecided(text: str) -> int:
        """Return the index of the escape that the next piece may continue."""
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
