"""Deltas (increments) of a response, and the interface of a receiver of deltas.

A TokenDelta and a TextDelta are created for each token. Both are dataclasses with slots that are
not frozen, because this type is the fastest. The creation of a named tuple takes 1.5 times as long,
and reading a field takes four times as long. A frozen dataclass also takes longer to create,
because it sets each field through `object.__setattr__`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from gateway.parsers.message import MessageEvent

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its log probability and the most likely alternatives.

    Attributes:
        token_id: the token.
        logprob: the log probability; None for the first token of a prompt.
        top: the alternatives, as (token id, log probability).
        text_offset: the index in the choice's text, in characters, at which the token's text
            begins.
        rank: the number of tokens in the vocabulary that are at least as likely as this token. Set
            only for the tokens of a prompt.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0
    rank: int = 0


class EngineStats(NamedTuple):
    """Statistics that the engine reports for a request, if the request asks for them.

    `reused_tokens` is the number of prompt tokens that were in the engine's KV cache. The module
    `triton/tensors` reads the statistics, and `api/usage` reports them to the client.
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
        finish: the finish reason, on the last delta; None if the engine does not report a reason.
        unshown: on the last delta, the number of generated tokens that produced no text, such as an
            end-of-sequence token.
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
        events: reasoning, content and tool calls that were parsed from the text; None if the text
            is not parsed. The events may come in a later delta than their text.
        stop: the stop string that ended the response; None if no stop string ended it.
        continued: True on the last delta of a response that one replica has started and another
            replica has resumed.
    """

    # Do not make fields keyword-only: two keyword arguments cost 1,350 instructions, which is 3 %
    # of the work for a token.
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
    """Receiver of the deltas of all choices of a request."""

    def accept(self, index: int, delta: TextDelta) -> bool:
        """Accept a delta of the choice `index`.

        Return False if the caller should await `drain` before the next delta. This method must not
        block, because it is called by the code that receives the engine's data.
        """

    async def drain(self, by: float | None = None) -> None:
        """Wait until the receiver can accept more deltas.

        `by` is a deadline in seconds of the event loop's clock; None for no deadline. Raise
        TimeoutError if the deadline passes.
        """
