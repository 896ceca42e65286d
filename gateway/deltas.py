"""Deltas of an answer, from the engine up to the API, and the interface of their receiver.

A TokenDelta and a TextDelta are created for each token, so both are dataclasses with slots that are
not frozen. A named tuple takes longer to create (0.32 instead of 0.21 us), and so does reading each
of its fields (16 instead of 4 ns). A frozen dataclass, which sets each field through
`object.__setattr__`, takes longer to create, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from gateway.parsers.message import MessageEvent

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log probability and its likeliest alternatives.

    Attributes:
        token_id: the token.
        logprob: the log probability; None for the first token of a prompt.
        top: the alternatives, as (token id, log probability).
        text_offset: the index in the choice's text, in characters, at which the token's text
            begins.
        rank: the number of tokens in the vocabulary that are at least as likely. Set only for the
            tokens of a prompt.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0
    rank: int = 0


class EngineStats(NamedTuple):
    """Statistics that the engine reports for a request if asked.

    `reused_tokens` is the number of prompt tokens that were in the engine's KV cache.
    `triton/tensors` reads the fields and `api/usage` reports them; the code in between passes them
    on unchanged.
    """

    reused_tokens: int = 0


@dataclass(slots=True)
class TokenDelta:
    """New output of the engine: token ids, or text from a model that returns text.

    Attributes:
        ids: the new token ids; empty if the model returns text.
        final: True for the last delta of the request.
        stats: the engine's statistics; None if the engine did not report them.
        logprobs: the log probabilities of `ids`.
        text: the new text, from a model that returns text.
        tokens: the number of tokens in `text`; None if the model does not report it.
        finish: the reason for the end, on the last delta; None if the engine does not report one.
        unshown: the number of generated tokens without text, on the last delta.
    """

    ids: list[int]
    final: bool
    stats: EngineStats | None = None
    logprobs: list[TokenLogprob] | None = None
    text: str | None = None
    tokens: int | None = None
    finish: Literal["stop", "length"] | None = None
    unshown: int = 0


@dataclass(slots=True)
class TextDelta:
    """New text of a choice.

    Attributes:
        text: the new text, valid Unicode; may be empty.
        tokens: the number of tokens generated so far for the choice.
        finish: the finish reason; set only on the last delta.
        ids: the new token ids.
        logprobs: the log probabilities of `ids`; empty if the request did not ask for them.
        events: the text parsed for tool calls and reasoning; None if the message is not parsed. An
            event comes later than its text while the parser is undecided.
        stop: the stop string that ended the answer; None if no stop string did.
        continued: True on the last delta of an answer that two replicas have sampled.
    """

    # No field is keyword-only: two keyword arguments cost 1,350 instructions, 3 % of the work for a
    # token.
    text: str
    tokens: int
    finish: FinishReason | None = None
    stats: EngineStats | None = None
    ids: Sequence[int] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    events: tuple[MessageEvent, ...] | None = None
    stop: str | None = None
    continued: bool = False


class Sink(Protocol):
    """A receiver of the deltas of a request's choices."""

    def accept(self, index: int, delta: TextDelta) -> bool:
        """Take the delta of the choice `index`.

        Return False if the caller should await `drain` before the next delta. Must not block: this
        method is called where the engine's bytes are received.
        """

    async def drain(self, by: float | None = None) -> None:
        """Wait until more deltas can be taken.

        Raise TimeoutError if no delta can be taken before `by`, a time of the event loop.
        """
