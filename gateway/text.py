"""Token ids to text deltas: incremental detokenizing, stop strings, finish reason.

One `TextStream` serves one choice, streaming or not, so both give the same text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from gateway.generation import FinishReason, Generation, TextDelta, TokenDelta, TokenLogprob
from gateway.message import MessageReader

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Enough context for a decoder that treats the first token differently (Metaspace drops its space).
_PRIME_IDS = 6
# UTF-8 needs at most 4 bytes and a token holds at least one, so text still undecodable after
# this many tokens never becomes a character.
_MAX_HELD_IDS = 4
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Incremental decoding that never shows half a character or loses a leading space.

    Bytes that are no UTF-8 (a sampled model may emit them) are dropped, never shown as U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        visible: Iterable[str] = (),
        *,
        skip_special: bool = True,
    ) -> None:
        """Special tokens are skipped but for those in `visible`."""
        self._skip_special = skip_special
        self._tokenizer = tokenizer
        ids = {tokenizer.token_to_id(token): token for token in visible}
        self._visible = {i: token for i, token in ids.items() if i is not None}
        context = prompt_ids[-_PRIME_IDS:]
        # A stream primed with half a character would repeat the prompt's end in its first text.
        if tokenizer.decode(context).endswith(_REPLACEMENT):
            context = []
        self._context = context
        self._restart()
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that became certain with this id; empty while a character is incomplete."""
        if token_id in self._visible:
            return self.flush() + self._visible[token_id]
        text = self._step(token_id)
        if text is not None:
            self._held = []
            return text.replace(_REPLACEMENT, "") if _REPLACEMENT in text else text
        self._held.append(token_id)
        if len(self._held) <= _MAX_HELD_IDS:
            return ""
        [given_up, *retry], self._held = self._held, []
        self._restart()
        return self._whole([given_up]) + "".join([self.push(held) for held in retry])

    def flush(self) -> str:
        """The whole characters among what was held back, once no more ids belong to them."""
        held, self._held = self._held, []
        if not held:
            return ""
        self._restart()
        return self._whole(held)

    def _whole(self, ids: list[int]) -> str:
        """One id can hold whole characters and then the first bytes of another."""
        skip = self._skip_special
        before = self._tokenizer.decode(self._context, skip_special_tokens=skip)
        text = self._tokenizer.decode(self._context + ids, skip_special_tokens=skip)[len(before) :]
        return text.replace(_REPLACEMENT, "")

    def _step(self, token_id: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception:  # the Rust binding raises bare Exception and leaves the stream broken
            self._restart()
            return self._stream.step(self._tokenizer, token_id)

    def _restart(self) -> None:
        self._stream = DecodeStream(self._context, skip_special_tokens=self._skip_special)


def text_offsets(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Where the text of each token begins, in characters; those of a split character share one."""
    detokenizer = Detokenizer(tokenizer, [], skip_special=False)
    offsets, length = [], 0
    for token_id in ids:
        offsets.append(length)
        length += len(detokenizer.push(token_id))
    return offsets


class StopStrings:
    """Finds the first stop string in streamed text, also when it is cut anywhere.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stop: tuple[str, ...], *, include: bool = False) -> None:
        self._stop = stop
        self._include = include
        self._longest = max(map(len, stop), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that may go out, and whether a stop string was reached.

        Of several matches the one that begins first counts, of those the longest; it is returned
        only with `include`.
        """
        if not self._stop:
            return text, False
        text = self._held + text
        matches = [(i, -len(s)) for s in self._stop if (i := text.find(s)) >= 0]
        if matches:
            self._held = ""
            start, length = min(matches)
            return text[: start - length if self._include else start], True
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-size:]
            if any(s.startswith(tail) for s in self._stop):
                return size
        return 0


class TextStream:
    """Turns the token deltas of one request into text deltas, the last with a finish reason."""

    def __init__(self, tokenizer: Tokenizer, generation: Generation) -> None:
        form = generation.message
        visible = form.markers() if form else ()
        self._detokenizer = Detokenizer(
            tokenizer, generation.prompt_ids, visible, skip_special=generation.skip_special_tokens
        )
        self._message = MessageReader(form) if form else None
        self._stop = StopStrings(generation.stop, include=generation.include_stop)
        self._stop_ids = generation.stop_ids
        self._max_tokens = generation.max_tokens
        self._min_tokens = generation.sampling.min_tokens
        self._longest_stop_ids = max(map(len, generation.stop_ids), default=0)
        self._last_ids: list[int] = []
        self._tokens = 0
        self._reused = 0
        self._ids: list[int] = []
        self._length = len(generation.echo or "")
        self._logprobs: list[TokenLogprob] = []

    def push(self, delta: TokenDelta) -> TextDelta:
        """Consumes one delta. After one with `finish` set nothing more may be pushed."""
        self._reused = self._reused or delta.reused_blocks
        text = self._text(delta)
        if self._message is None:
            return text
        events = self._message.push(text.text)
        finish = text.finish
        if finish is not None:
            events += self._message.finish()
            if finish == "stop" and self._message.called:
                finish = "tool_calls"
        return replace(text, finish=finish, events=tuple(events))

    def _text(self, delta: TokenDelta) -> TextDelta:
        pieces = []
        self._ids = []
        for position, token_id in enumerate(delta.ids):
            self._tokens += 1
            self._ids.append(token_id)
            if delta.logprobs is not None and position < len(delta.logprobs):
                entry = replace(delta.logprobs[position], text_offset=self._length)
                self._logprobs.append(entry)
            decoded = self._detokenizer.push(token_id)
            self._length += len(decoded)
            if self._tokens <= self._min_tokens:
                pieces.append(decoded)
                continue
            text, stopped = self._stop.push(decoded)
            pieces.append(text)
            if stopped:
                return self._delta(pieces, "stop")
        if self._longest_stop_ids and delta.ids:
            self._last_ids = (self._last_ids + delta.ids)[-self._longest_stop_ids :]
        if not delta.final:
            return self._delta(pieces)
        text, stopped = self._stop.push(self._detokenizer.flush())
        pieces += [text, self._stop.flush()]
        return self._delta(pieces, "stop" if stopped else self._finish_reason())

    def _delta(self, pieces: list[str], finish: FinishReason | None = None) -> TextDelta:
        logprobs, self._logprobs = tuple(self._logprobs), []
        text, ids = "".join(pieces), tuple(self._ids)
        return TextDelta(text, self._tokens, finish, self._reused, logprobs, ids)

    def _finish_reason(self) -> FinishReason:
        # The engine gives no finish reason: an end id is not in its output, a matched stop word is.
        if self._tokens < self._max_tokens or self._ends_with_stop_ids():
            return "stop"
        return "length"

    def _ends_with_stop_ids(self) -> bool:
        return any(tuple(self._last_ids[-len(ids) :]) == ids for ids in self._stop_ids if ids)
