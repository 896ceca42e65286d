"""Reader of the responses of the llmapi repository's model.

Each output is sent as a BYTES tensor with one text. Numbers are sent as decimal text, even if the
model's configuration declares a number type. Outputs that were not requested or have no value are
absent, or have the text ``None``. A final response may have no outputs at all.
"""

from __future__ import annotations

from typing import Literal

from gateway.deltas import EngineStats, TokenDelta
from gateway.errors import EngineUnavailable
from gateway.triton import bytes_tensor
from gateway.triton.llmapi.accumulated import AccumulatedText
from gateway.triton.llmapi.template import TextTemplate
from gateway.triton.protobuf import pb
from gateway.triton.tensors import is_final

_STATUS_OUTPUTS = frozenset({"finish_reason", "stop_reason", "kv_cache_reused_block"})
_LENGTH_BYTES = 4  # size of the length field before each text of a BYTES tensor

_FINISH_REASONS: dict[str, Literal["stop", "length"]] = {"stop": "stop", "length": "length"}
# Finish reasons of a request that the engine has aborted on its own, without a stop request.
_ABORT_REASONS = frozenset({"cancelled", "timeout"})


class LlmapiReader:
    """Reader of the responses to one request."""

    def __init__(self, *, decoupled: bool, tokens_per_block: int = 1) -> None:
        """Create a reader.

        Args:
            decoupled: True if the model may send several responses to a request.
            tokens_per_block: block size in tokens of the KV cache. Used to calculate the number of
                cached tokens from the number of cached blocks.
        """
        self._decoupled = decoupled
        self._tokens_per_block = tokens_per_block
        self._text = AccumulatedText()
        self._template: TextTemplate | None = None
        self._finish: Literal["stop", "length"] | None = None
        self._unshown = 0
        self._stats: EngineStats | None = None

    def learn(self, data: bytes, response: pb.ModelInferResponse) -> None:
        """Store the layout of a response, so that `find_text` need not parse later responses.

        `data` is the serialized response, and `response` is the same response parsed.
        """
        if not is_final(response):
            self._template = TextTemplate.of(data, response)

    def find_text(self, data: bytes) -> tuple[int, int] | None:
        """Return (start, end) of the text's bytes in a serialized response.

        Return None if the response must be parsed: it may have other outputs besides the text, or
        `learn` has stored no layout.
        """
        return None if self._template is None else self._template.text(data)

    def text_delta(self, data: bytes, text: tuple[int, int]) -> TokenDelta:
        """Return the new text in a serialized response. `text` is the result of `find_text`."""
        return TokenDelta([], False, self._stats, text=self._text.take_new(data, *text))

    def delta(self, response: pb.ModelInferResponse) -> TokenDelta:
        """Return the new part of the answer in a parsed response, as a `TokenDelta`.

        The last delta has the finish reason if the engine has reported one. Raise EngineError if
        the engine has changed text that it sent before. Raise EngineUnavailable if the engine has
        aborted the request.
        """
        added = ""
        for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
            if tensor.name == "text_output":
                added = self._text.take_new(raw, _LENGTH_BYTES)
            elif tensor.name in _STATUS_OUTPUTS:
                self._read_status(tensor.name, raw)
        final = is_final(response) or not self._decoupled
        if not final:
            return TokenDelta([], False, self._stats, text=added)
        return TokenDelta(
            [], True, self._stats, text=added, finish=self._finish, unshown=self._unshown
        )

    def _read_status(self, name: str, raw: bytes) -> None:
        [value] = bytes_tensor.unpack(raw) or [""]
        if name == "finish_reason":
            if value in _ABORT_REASONS:
                raise EngineUnavailable("The engine gave the request up; try again shortly.")
            self._finish = _FINISH_REASONS.get(value)
        elif name == "stop_reason":
            # If the value is a token id, an additional end-of-sequence token has ended the answer.
            # This token has no text, but engines count it as generated.
            self._unshown = int(value.isdecimal())
        elif value.isdecimal():
            self._stats = EngineStats(reused_tokens=int(value) * self._tokens_per_block)
