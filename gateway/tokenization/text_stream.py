"""Conversion of token ids to text deltas: incremental detokenizing, stop strings, finish reason.

Each choice of a response has a `TextStream`. Streaming and non-streaming requests both use this
class, so they get the same text.

See decisions 001 and 033 in docs/decisions.
"""

from __future__ import annotations

from dataclasses import replace

from gateway.deltas import EngineStats, FinishReason, TextDelta, TokenDelta, TokenLogprob
from gateway.generation.engine_request import Generation
from gateway.parsers.message import MessageReader
from gateway.tokenization.content_stops import make_stops
from gateway.tokenization.vocabulary import Vocabulary


def with_events(message: MessageReader, text: TextDelta) -> TextDelta:
    """Parse the text of a delta into message events. Return the delta with its `events` set.

    The finish reason becomes "stop" if the response exceeds the maximum number of tool calls. It
    becomes "tool_calls" if the response ends with a tool call.
    """
    events = message.read(text.text)
    if message.exceeded and text.finish is None:
        # End the response at the maximum number of tool calls. The engine does not know this
        # maximum, and would continue until the context is full.
        text.finish = "stop"
    if text.finish is not None:
        events += message.finish(cut=text.finish == "length" or text.stop is not None)
        if text.finish == "stop" and message.ends_with_call:
            text.finish = "tool_calls"
    text.events = tuple(events)
    return text


class TextStream:
    """Converter of the token deltas of one choice to text deltas.

    The last text delta has a finish reason.
    """

    def __init__(self, vocabulary: Vocabulary, generation: Generation) -> None:
        params = generation.params
        form = params.message
        visible = form.markers() if form else ()
        self._decoder = vocabulary.decoder(
            generation.prompt_ids, visible, skip_special=params.skip_special_tokens
        )
        self._message = MessageReader(form) if form else None
        self._stop = make_stops(params)
        self._stop_ids = generation.stop_ids
        self._later_end_ids = generation.later_end_ids
        self._max_tokens = generation.max_tokens
        self._min_tokens = params.min_tokens
        self._longest_stop_ids = max(map(len, generation.stop_ids), default=0)
        # True if each token's own text is needed, for stop strings, end ids or log probabilities.
        # Otherwise, all new ids are decoded at once, which is faster.
        self._one_by_one = (
            bool(params.stop or generation.later_end_ids) or params.logprobs is not None
        )
        self._last_ids: list[int] = []
        self._tokens = 0
        self._stats: EngineStats | None = None
        self._length = len(generation.echo or "")

    def to_text(self, delta: TokenDelta) -> TextDelta:
        """Return the text delta for a token delta.

        After a text delta with a `finish` reason, do not call this method again.
        """
        if delta.stats is not None and self._stats is None:
            self._stats = delta.stats
        text = self._decode_each(delta) if self._one_by_one else self._decode_all(delta)
        return text if self._message is None else with_events(self._message, text)

    @property
    def at_end(self) -> bool:
        """True if the token limit is reached or the text ends with stop ids."""
        return self._tokens >= self._max_tokens or self._ends_with_stop_ids()

    def cut_short(self) -> TextDelta:
        """End the text in the same way as at the token limit. Return the last delta."""
        self._max_tokens = self._tokens
        return self.to_text(TokenDelta([], final=True))

    def _decode_all(self, delta: TokenDelta) -> TextDelta:
        ids = delta.ids
        self._tokens += len(ids)
        text = self._decoder.decode(ids)
        if not delta.final:
            if self._longest_stop_ids:
                self._remember(ids)
            return TextDelta(text, self._tokens, None, self._stats, ids)
        self._remember(ids)
        text += self._decoder.flush()
        return TextDelta(text, self._tokens, self._finish_reason(), self._stats, ids)

    def _decode_each(self, delta: TokenDelta) -> TextDelta:
        """Decode the new ids one by one, up to the end of the response.

        The first `min_tokens` ids cannot end the response. After them, the response ends with an id
        that completes a stop string, or with an id in `later_end_ids`.
        """
        pieces: list[str] = []
        logprobs: list[TokenLogprob] = []
        for position, token_id in enumerate(delta.ids):
            self._tokens += 1
            if delta.logprobs is not None and position < len(delta.logprobs):
                logprobs.append(replace(delta.logprobs[position], text_offset=self._length))
            decoded = self._decoder.decode((token_id,))
            self._length += len(decoded)
            if self._tokens <= self._min_tokens:
                pieces.append(self._stop.skip(decoded))
                continue
            text, stopped = self._stop.split_at_stop(decoded)
            pieces.append(text)
            if stopped is not None:
                ids = delta.ids[: position + 1]
                return self._delta(pieces, logprobs, ids, "stop", stopped)
            if token_id in self._later_end_ids:
                return self._build_last_delta(pieces, logprobs, delta.ids[: position + 1], "stop")
        self._remember(delta.ids)
        if not delta.final:
            return self._delta(pieces, logprobs, delta.ids, None)
        return self._build_last_delta(pieces, logprobs, delta.ids, self._finish_reason())

    def _build_last_delta(
        self,
        pieces: list[str],
        logprobs: list[TokenLogprob],
        ids: list[int],
        finish: FinishReason,
    ) -> TextDelta:
        """Return the last delta, including the text that was held back.

        If the held-back text contains a stop string, the delta's text ends there.
        """
        text, stopped = self._stop.end(self._decoder.flush())
        pieces.append(text)
        return self._delta(pieces, logprobs, ids, finish if stopped is None else "stop", stopped)

    def _delta(
        self,
        pieces: list[str],
        logprobs: list[TokenLogprob],
        ids: list[int],
        finish: FinishReason | None,
        stop: str | None = None,
    ) -> TextDelta:
        text = "".join(pieces)
        entries = tuple(logprobs)
        return TextDelta(text, self._tokens, finish, self._stats, ids, entries, stop=stop)

    def _remember(self, ids: list[int]) -> None:
        """Store the last ids of the response, to compare them with the sequences of stop ids."""
        if self._longest_stop_ids and ids:
            self._last_ids = (self._last_ids + ids)[-self._longest_stop_ids :]

    def _finish_reason(self) -> FinishReason:
        # Infer the finish reason, because the engine reports none. The engine's output includes
        # stop ids but not the end id. If a response ended with the end id, it is therefore shorter
        # than the token limit.
        if self._tokens < self._max_tokens or self._ends_with_stop_ids():
            return "stop"
        return "length"

    def _ends_with_stop_ids(self) -> bool:
        return any(tuple(self._last_ids[-len(ids) :]) == ids for ids in self._stop_ids if ids)
