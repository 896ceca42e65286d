"""Parser of tool calls of Llama 3.x: JSON objects, separated by `;`.

The token `<|python_tag|>` may precede an object:

    {"name": "get_weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}

Source: Llama 3.1 and 3.2 prompt formats. As in vLLM's `llama3_json`, text may precede a call, the
key `arguments` is accepted instead of `parameters`, and whitespace alone may separate calls.
"""

from __future__ import annotations

from collections.abc import Generator

from gateway.parsers.tools.json_calls import JsonToolParser

_PYTHON_TAG = "<|python_tag|>"


class LlamaToolParser(JsonToolParser):
    markers = (_PYTHON_TAG,)
    tagged = False

    def _run(self) -> Generator[None, str, None]:
        char = yield
        while True:
            tag = yield from self._text(char, ("{", _PYTHON_TAG))
            char = yield
            if tag == _PYTHON_TAG:
                char = yield from self._space(char)
                if char != "{":
                    self._release()
                    continue
                self._hold(char)
                char = yield
            before = self.calls
            char = yield from self._attempt(self._object(char))
            if self.calls > before:
                char = yield from self._gap(char)
                if char == ";":
                    self._drop()
                    char = yield
