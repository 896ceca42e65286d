"""The Hermes form, also Qwen2.5's and Qwen3's: a JSON object in tags for each call.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Source: NousResearch/Hermes-Function-Calling; the chat templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

from collections.abc import Generator

from gateway.parsers.tools.json_calls import JsonToolParser
from gateway.parsers.tools.parser import NotACall, Step

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class HermesToolParser(JsonToolParser):
    """A missing closing tag or brace, and a brace too many, do no harm, as small models do that."""

    markers = (_OPEN, _CLOSE)

    def _run(self) -> Generator[None, str, None]:
        tags: tuple[str, ...] = (_OPEN,)
        char = yield
        while True:
            tag = yield from self._text(char, tags)
            if tag == _CLOSE:
                self._drop()
                tags = (_OPEN,)
                char = yield
                continue
            before = self.calls
            char = yield from self._attempt(self._body((yield)))
            if self.calls > before:
                tags = (_OPEN, _CLOSE)
                char = yield from self._gap(char)
                while char == "}":
                    self._drop()
                    char = yield from self._gap((yield))

    def _body(self, char: str) -> Step:
        char = yield from self._space(char)
        if char != "{":
            raise NotACall(char)
        self._hold(char)
        return (yield from self._object((yield)))
