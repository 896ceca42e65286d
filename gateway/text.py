"""Token ids to text deltas: incremental detokenizing, stop strings, finish reason.

One `TextStream` serves one choice, streaming or not, so both give the same text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers.decoders import DecodeStream

from gateway.generation import FinishReason, Generation, TextDelta, TokenDelta

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

    def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        context = prompt_ids[-_PRIME_IDS:]
        # A stream primed with half a character would repeat the prompt's end in its first text.
        if tokenizer.decode(context).endswith(_REPLACEMENT):
            context = []
        self._context = context
        self._stream = DecodeStream(context, skip_special_tokens=True)
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that became certain with this id; empty while a character is incomplete."""
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
        """The whole characters among what was held back, once no more ids can come."""
        held, self._held = self._held, []
        return self._whole(held) if held else ""

    def _whole(self, ids: list[int]) -> str:
        """One id can hold whole characters and then the first bytes of another."""
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + ids)[len(before) :]
        return text.replace(_REPLACEMENT, "")

    def _step(self, token_id: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token_id)
        except Exception:  # the Rust binding raises bare Exception and leaves the stream broken
            self._restart()
            return self._stream.step(self._tokenizer, token_id)

    def _restart(self) -> None:
        self._stream = DecodeStream(self._context, skip_special_tokens=True)


class StopStrings:
    """Finds the first stop string in streamed text, also when it is cut anywhere.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that may go out, and whether a stop string was reached.

        Of several matches the one that begins first counts; the stop string is not returned.
        """
        if not self._stop:
            return text, False
        text = self._held + text
        found = min((i for s in self._stop if (i := text.find(s)) >= 0), default=-1)
        if found >= 0:
            self._held = ""
            return text[:found], True
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
        self._detokenizer = Detokenizer(tokenizer, generation.prompt_ids)
        self._stop = StopStrings(generation.stop)
        self._stop_ids = generation.stop_ids
        self._max_tokens = generation.max_tokens
        self._longest_stop_ids = max(map(len, generation.stop_ids), default=0)
        self._last_ids: list[int] = []
        self._tokens = 0

    def push(self, delta: TokenDelta) -> TextDelta:
        """Consumes one delta. After one with `finish` set nothing more may be pushed."""
        pieces = []
        for token_id in delta.ids:
            self._tokens += 1
            text, stopped = self._stop.push(self._detokenizer.push(token_id))
            pieces.append(text)
            if stopped:
                return TextDelta("".join(pieces), self._tokens, "stop")
        if self._longest_stop_ids and delta.ids:
            self._last_ids = (self._last_ids + delta.ids)[-self._longest_stop_ids :]
        if not delta.final:
            return TextDelta("".join(pieces), self._tokens)
        text, stopped = self._stop.push(self._detokenizer.flush())
        pieces.append(text)
        if stopped:
            return TextDelta("".join(pieces), self._tokens, "stop")
        pieces.append(self._stop.flush())
        return TextDelta("".join(pieces), self._tokens, self._finish_reason())

    def _finish_reason(self) -> FinishReason:
        # The engine gives no finish reason: an end id is not in its output, a matched stop word is.
        if self._tokens < self._max_tokens or self._ends_with_stop_ids():
            return "stop"
        return "length"

    def _ends_with_stop_ids(self) -> bool:
        return any(tuple(self._last_ids[-len(ids) :]) == ids for ids in self._stop_ids if ids)
