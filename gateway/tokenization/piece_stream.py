"""Conversion of an engine's output without token ids to text deltas.

Handles stop strings, and determines the finish reason and the number of tokens.
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
    """Converter of the deltas of one choice to text deltas. The last has the finish reason.

    The number of tokens is the number that the deltas report. If the deltas report no number, the
    tokens are counted with the tokenizer.
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

        Do not call this again after a result with `finish`.
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
        """Always False: without token ids, it is unknown whether the engine will send more text."""
        return False

    def cut_short(self) -> TextDelta:
        """End the text as if the token limit had been reached; return the last delta."""
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
        """Return the number of tokens up to the end of the stop string, even if it is not sent."""
        behind = self._text.text_from(self._shown)
        found = [len(stop) for stop in self._hidden if behind.startswith(stop)]
        return self._text.count_all(self._shown + max(found, default=0))

    def _finish_reason(self, delta: TokenDelta) -> FinishReason:
        if delta.finish is not None:
            return delta.finish
        if self._endless:
            self._tokens = self._max_tokens
        return "length" if self._tokens >= self._max_tokens else "stop"
