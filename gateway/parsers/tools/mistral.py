"""Parser of tool calls of Mistral's models.

The token `[TOOL_CALLS]` precedes the calls. Before tokenizer v11, a JSON list of calls follows
the token. Since tokenizer v11, each call has its own token, its name and its arguments:

    [TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]
    [TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]get_time{}
    [TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}

Source: mistral-common, tokenizers v3 to v13.
"""

from __future__ import annotations

from collections.abc import Generator

from gateway.parsers.tools.json_calls import JsonToolParser
from gateway.parsers.tools.parser import NotACall, Step

_OPEN, _CALL_ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralToolParser(JsonToolParser):
    markers = (_OPEN, _CALL_ID, _ARGS)

    def _run(self) -> Generator[None, str, None]:
        char = yield
        while True:
            yield from self._text(char, (_OPEN,))
            char = yield from self._attempt(self._body((yield)))

    def _body(self, char: str) -> Step:
        char = yield from self._space(char)
        if char in "[{":
            self._hold(char)
            read = self._list if char == "[" else self._object
            return (yield from read((yield)))
        letters: list[str] = []
        while char.isalnum() or char in "_-.:/":
            letters.append(char)
            self._hold(char)
            char = yield
        name = "".join(letters)
        if name and char == "[":
            self._name = name
        char = yield from self._separators(char)
        if not name or char != "{":
            raise NotACall(char)
        self._commit(name)
        return (yield from self._value(char, self._events.arguments))

    def _separators(self, char: str) -> Step:
        """Parse the markers before the arguments: `[ARGS]`, or `[CALL_ID]` with an id and `[ARGS]`.

        The id is dropped, because the model has invented it.
        """
        char = yield from self._space(char)
        while char == "[":
            marker = char
            self._hold(char)
            while (_CALL_ID.startswith(marker) or _ARGS.startswith(marker)) and marker[-1] != "]":
                char = yield
                marker += char
                self._hold(char)
            if marker[-1] != "]":
                self._held.pop()
                raise NotACall(char)
            char = yield
            while marker == _CALL_ID and char.isalnum():
                self._hold(char)
                char = yield
            char = yield from self._space(char)
        return char
