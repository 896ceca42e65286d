"""What crosses the rooms: a validated request on its way in, deltas on their way out.

Nothing here knows HTTP, gRPC or a tokenizer. The deltas are named tuples: one of each is made for
every token, and a frozen dataclass costs three times as much (1.1 against 0.4 us).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from adapters.adapter import Converted
from gateway.parsers.message import MessageEvent, MessageForm

FinishReason = Literal["stop", "length", "tool_calls"]
_LEAST = 1e-6
MAX_CHOICES = 128
"""In one request, over all its prompts."""

ColdCause = Literal["first_use", "evicted", "restarted", "refused"]
StopReason = Literal["disconnect", "stop_string", "timeout", "shutdown"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters with OpenAI's meaning; `temperature` 0 is greedy.

    `top_k` 0 means no limit. `seed` is always set, so that the engine never falls back to its
    own constant one. `logit_bias` holds (token id, bias) pairs.
    """

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        # On the wire these are float32, in which a tiny value is 0, and 0 means "not set".
        return self.temperature < _LEAST or self.top_p < _LEAST or self.top_k == 1


@dataclass(frozen=True, slots=True)
class Guide:
    """What the text must match, as the engine's guided decoding takes it."""

    type: Literal["json_schema", "regex", "ebnf_grammar"]
    text: str


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter version of a request. `weights` reads its tensors, which only a cold one needs.

    `name` labels metrics; `task_id` is what the engine knows the version by.
    """

    name: str
    task_id: int
    weights: Callable[[], Awaitable[Converted]]


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """What a model that takes text is sent in place of token ids.

    `stop` are the stop strings and further end-of-sequence tokens, as a help to the engine only;
    `bias` holds (word, bias) pairs. `restated` is what an answer begins with that has the prompt
    in it.
    """

    text: str
    stop: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    bias: tuple[tuple[str, float], ...] = ()
    restated: str = ""


@dataclass(frozen=True, slots=True)
class Generation:
    """A request that may run: tokenized, within the engine's limits, with a unique id.

    `beams` is the beam width, 0 for sampling; the request then answers for as many choices.
    `echo` is the prompt's text where the answer begins with it.
    `logprobs` is the number of alternatives wanted with each token's log probability, if any.
    `end_id` ends the sequence and is not in the output; None goes on to `max_tokens`.

    `message` says how to read the text of a chat, None for plain text; `guide` what it must match.
    `stop` holds the stop strings; `stop_ids` the same as token ids plus further end-of-sequence
    ids, as a help to the engine only: the text decides.
    """

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_ids: tuple[tuple[int, ...], ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    end_id: int | None = None
    usage: bool = True
    logprobs: int | None = None
    echo: str | None = None
    beams: int = 0
    length_penalty: float = 1.0
    bad_ids: tuple[tuple[int, ...], ...] = ()
    lora: Lora | None = None
    message: MessageForm | None = None
    guide: Guide | None = None
    text: TextPrompt | None = None
    """For a model that takes text; `prompt_ids` are then what it makes of that."""


@dataclass(frozen=True, slots=True)
class Options:
    """What a request asks for, the same for all its prompts; `max_tokens` None is no limit.

    With `beam_search` the `n` choices of a prompt are the best `n` beams of one engine request.
    `usage` says whether the answer reports it, so whether the engine need count cached tokens;
    `token_ids` whether it shows the ids. `tenant` and `priority` decide about its turn, and
    `timeout_s` shortens the time that it may take.
    """

    sampling: Sampling
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    truncate_prompt: int | None = None
    usage: bool = True
    logprobs: int | None = None
    echo: bool = False
    beam_search: bool = False
    length_penalty: float = 1.0
    max_tokens: int | None = None
    n: int = 1
    lora: Lora | None = None
    message: MessageForm | None = None
    guide: Guide | None = None
    guide_param: str | None = None
    """The parameter that asked for the guide, for errors."""
    logprobs_param: str = "logprobs"
    """The parameter that asked for log probabilities, for errors."""
    stream: bool = False
    token_ids: bool = False
    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None


@dataclass(slots=True)
class Meter:
    """What a request has used, added up as its choices end, however they end.

    `reused_blocks` are those of the prompt that were in the engine's cache, of the least cached
    choice. `finished` has the reason of each choice that came to its end.
    """

    began: bool = False
    """Whether the engine was asked at all."""
    tokens: int = 0
    reused_blocks: int | None = None
    finished: list[FinishReason] = field(default_factory=list)
    first_token: float | None = None
    """When the first token of any choice came, in `time.perf_counter`; None in a beam search."""

    def add(self, last: TextDelta) -> None:
        """Adds a choice by the last delta that there was of it."""
        self.tokens += last.tokens
        reused = last.reused_blocks
        self.reused_blocks = (
            reused if self.reused_blocks is None else min(reused, self.reused_blocks)
        )
        if last.finish is not None:
            self.finished.append(last.finish)


@dataclass(frozen=True, slots=True)
class Batch:
    """The generations of one request, one per choice: all of the first prompt, then the next.

    Each choice is an engine request of its own, so that a stop string ends one choice alone
    (`num_return_sequences` shares one id and one stop); only a beam search is one request for all
    choices of its prompt. `choices` counts all, `prompt_tokens` counts each prompt once.
    `deadline` is in the event loop's time, `timeout_s` after the request came.
    """

    request_id: str
    generations: list[Generation]
    prompts: int
    choices: int
    prompt_tokens: int
    fingerprint: str
    tokens_per_block: int
    tenant: str
    priority: int
    timeout_s: float
    deadline: float
    meter: Meter = field(default_factory=Meter)

    @property
    def places(self) -> int:
        """How much of the engine it takes: a place for each sequence that is generated."""
        return sum(generation.beams or 1 for generation in self.generations)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log probability, and likely alternatives as (token id, value).

    The first token of a prompt has no log probability. `text_offset` is where its text begins, in
    characters of the choice's text.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0


class TokenDelta(NamedTuple):
    """New token ids from the engine; `final` marks the last delta of the request.

    `reused_blocks` counts KV-cache blocks of the prompt that were there already, if asked for;
    `logprobs` are those of `ids`. A model that gives text gives `text` and no ids, and perhaps the
    number of its tokens.
    """

    ids: list[int]
    final: bool
    reused_blocks: int = 0
    logprobs: list[TokenLogprob] | None = None
    text: str | None = None
    tokens: int | None = None


class TextDelta(NamedTuple):
    """New text, valid Unicode, possibly empty; `tokens` is the running count of generated ids.

    `ids` are those of this delta. `finish` is set on the last delta and only there. Where a message
    is read for tool calls or reasoning, `events` say what the text is, and lag behind it while that
    is undecided.
    """

    text: str
    tokens: int
    finish: FinishReason | None = None
    reused_blocks: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    ids: Sequence[int] = ()
    events: tuple[MessageEvent, ...] | None = None


class Sink(Protocol):
    """Where the deltas of a request's choices go."""

    def accept(self, index: int, delta: TextDelta) -> bool:
        """Takes what is new in a choice. False when `drain` should be awaited before the next.

        It is called from wherever the engine's bytes are received, and must not wait.
        """

    async def drain(self) -> None:
        """Returns once more can be taken."""


@dataclass(frozen=True, slots=True)
class ColdSend:
    """Weights that went to the engine: `seconds` from reading them to its first response.

    The cause `refused` means in vain: the engine's cache was full of adapters in use.
    """

    adapter: str
    cause: ColdCause
    nbytes: int
    seconds: float
