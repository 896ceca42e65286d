"""Conversion of an engine's text without token ids to the text deltas of a response.

The conversion searches for stop strings, and finds the finish reason and the number of tokens.
"""

from __future__ import annotations

from tokenizers import Tokenizer

from gateway.deltas import EngineStats, FinishReason, TextDelta, TokenDelta
from gateway.generation.engine_request import Generation
from gateway.parsers.message import MessageReader
from gateway.tokenization.content_stops import make_stops
from gateway.tokenization.text_count import TextCount
from gateway.tokenization.text_stream import with_events


class PieceStream:
    """Converter of the engine's deltas of one choice to text deltas.

    The last text delta has the finish reason. The number of tokens is the number that the engine
    reports. If the engine reports no number, the tokens are counted with the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer, generation: Generation) -> None:
        self._text = TextCount(tokenizer)
        params = generation.params
        self._message = MessageReader(params.message) if params.message else None
        self._stop = make_stops(params)
        self._max_tokens = generation.max_tokens
        self._min_tokens = params.min_tokens
        words = generation.text.stop if generation.text else ()
        self._endless = generation.end_id is None and not words
        self._hidden = () if params.include_stop else params.stop
        self._shown = 0
        self._tokens = 0
        self._stats: EngineStats | None = None

    def to_text(self, delta: TokenDelta) -> TextDelta:
        """Return the text delta for a delta of the engine.

        After a text delta with a `finish` reason, do not call this method again.
        """
        self._stats = self._stats or delta.stats
        piece = delta.text or ""
        self._count(delta, piece)
        stopped: str | None = None
        if delta.final:
            text, stopped = self._stop.end(piece)
        elif self._tokens > self._min_tokens:
            text, stopped = self._stop.split_at_stop(piece)
        else:
            text = self._stop.skip(piece)
        finish: FinishReason | None = None
        self._shown += len(text)
        if stopped is not None:
            finish = "stop"
            if delta.tokens is None:
                self._tokens = self._until_stop()
        elif delta.final:
            finish = self._finish_reason(delta)
        tokens = min(self._tokens, self._max_tokens)
        found = TextDelta(text, tokens, finish, self._stats, stop=stopped)
        return found if self._message is None else with_events(self._message, found)

    @property
    def at_end(self) -> bool:
        """Always False. Without token ids, it is unknown if the engine will send more text."""
        return False

    def cut_short(self) -> TextDelta:
        """End the text in the same way as at the token limit. Return the last delta."""
        self._max_tokens = self._tokens
        return self.to_text(TokenDelta([], final=True, tokens=0, finish="length"))

    def _count(self, delta: TokenDelta, piece: str) -> None:
        if delta.tokens is None:
            self._text.add(piece, self._shown)
            self._tokens = self._text.tokens
        else:
            self._tokens += delta.tokens
        if delta.finish == "length":
            self._tokens = self._max_tokens
        elif delta.final and delta.tokens is None:
            self._tokens = self._text.count_all() + delta.unshown

    def _until_stop(self) -> int:
        """Return the number of tokens from the beginning of the text to the end of the stop string.

        The tokens of the stop string are counted even if the string is not sent to the client.
        """
        behind = self._text.text_from(self._shown)
        found = [len(stop) for stop in self._hidden if behind.startswith(stop)]
        return self._text.count_all(self._shown + max(found, default=0))

    def _finish_reason(self, delta: TokenDelta) -> FinishReason:
        if delta.finish is not None:
            return delta.finish
        if self._endless:
            self._tokens = self._max_tokens
        return "length" if self._tokens >= self._max_tokens else "stop"
