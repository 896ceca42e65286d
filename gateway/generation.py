"""A request as it goes down from the API to the engine: validated, then tokenized, then counted.

Its answer comes back up as the deltas of `gateway.deltas`. Every room between the API and Triton
may know these types, so nothing here knows HTTP, gRPC or a tokenizer.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from adapters.adapter import Converted, Dtype
from gateway.deltas import FinishReason, TextDelta, TokenLogprob
from gateway.parsers.message import MessageForm
from gateway.stops import Stops
from guides.kinds import Kind, Policy

_GREEDY_THRESHOLD = 1e-6
MAX_CHOICES = 128
MODEL_MAXIMUM = -1
"""A length to which a prompt is cut: what the model takes beside the answer's `max_tokens`."""
"""In one request, over all its prompts."""
MAX_SEED = 2**63 - 1


PlainParameter = Literal["frequency_penalty", "presence_penalty", "repetition_penalty"]


@dataclass(slots=True, kw_only=True)
class Sampling:
    """Sampling parameters with OpenAI's meaning; `temperature` 0 is greedy.

    `top_k` 0 means no limit; `logit_bias` holds (token id, bias) pairs. `plain` holds what goes to
    the model as it is, to the logical input of its name, where it differs from the default.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    plain: tuple[tuple[PlainParameter, float], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def greedy(self) -> bool:
        # The engine takes these as float32, in which a tiny value is 0, and 0 means "not set".
        return (
            self.temperature < _GREEDY_THRESHOLD
            or self.top_p < _GREEDY_THRESHOLD
            or self.top_k == 1
        )


@dataclass(frozen=True, slots=True)
class Guide:
    """A constraint on the text, as the engine's guided decoding takes it.

    `best_effort` maps JSON paths of a schema to what the client calls the schemas there: under
    these, what cannot be enforced is left out.
    """

    type: Kind
    text: str
    best_effort: tuple[tuple[str, str], ...] = ()


class Folders(Protocol):
    """Where engines that read adapters from their own disk have one version."""

    def at(self, endpoint: str) -> str | None:
        """Its folder as that replica sees it; None where it is not there, as far as is known."""

    def using(self, endpoint: str) -> AbstractContextManager[object]:
        """While a request names it there: until then it is not taken away."""

    async def wait_for_poll(self) -> None:
        """Returns when replicas have been looked at once more. Raises EngineError where the version
        will never come."""


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter version of a request.

    `name` labels metrics; `task_id` is what the engine knows the version by. `weights` reads its
    tensors, `nbytes` of `dtype` for engines of `tp_size` (None: of any), which only a cold one
    needs: within `turn`, which lasts until they are sent. Engines that read adapters from their own
    disk need `folders` instead. `tenant` is whose request it is: tenants share the room that an
    engine has for adapters.
    """

    name: str
    task_id: int
    nbytes: int
    weights: Callable[[], Awaitable[Converted]]
    upload_slot: Callable[[], AbstractAsyncContextManager[object]] = nullcontext
    folders: Folders | None = None
    dtype: Dtype | None = None
    tp_size: int | None = None
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """What a model that takes text is sent in place of token ids.

    `stop` are the stop strings and further end-of-sequence tokens, as a help to the engine only;
    `bias` holds (word, bias) pairs. `restated` is what an answer begins with that has the prompt
    in it. `whole` asks for the answer in one response.
    """

    text: str
    stop: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    bias: tuple[tuple[str, float], ...] = ()
    restated: str = ""
    single_response: bool = False


@dataclass(slots=True, kw_only=True)
class GenerationParams:
    """What the client asks of every generation of its request.

    `stop` holds the stop strings, `include_stop` says whether the one that was found is shown.
    `logprobs` is the number of alternatives wanted with each token's log probability, if any;
    `length_penalty` is that of a beam search. `usage` says whether the engine need count cached
    tokens. `message` says how to read the text of a chat, None for plain text; `guide` what it
    must match.
    """

    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    usage: bool = True
    logprobs: int | None = None
    length_penalty: float = 1.0
    lora: Lora | None = None
    message: MessageForm | None = None
    guide: Guide | None = None

    @property
    def engine_stop(self) -> tuple[str, ...]:
        """The stop strings that the engine may match by itself.

        An engine matches them in all of its text, so it gets none that count in a part of it only:
        behind `min_tokens`, or behind reasoning.
        """
        if self.sampling.min_tokens or (self.message is not None and self.message.has_reasoning):
            return ()
        return self.stop


@dataclass(slots=True, kw_only=True)
class Caller:
    """Whose request it is: what decides about its turn and its time.

    `timeout_s` is what it may take, where the client wants less than the gateway allows, and
    `first_token_within` in how many seconds its first token is wanted, or else no turn. Without
    that, a turn that is expected after more than `max_expected_wait_s` is none. Where it
    is `billed`, cached tokens are counted although the answer may not tell of them. One that is
    `apart` is told nothing of what others' prompts have left in the engine's cache, and not sent
    there to meet them. `guides` says what becomes of its guides.
    """

    tenant: str = ""
    priority: int = 0
    timeout_s: float | None = None
    first_token_within: float | None = None
    max_expected_wait_s: float | None = None
    billed: bool = False
    isolated_cache: bool = False
    guides: Policy = "checked"


DEFAULT_CALLER = Caller()


class Unenforced(NamedTuple):
    """The keywords of a guide's schema that are not enforced.

    Attributes:
        names: the first ones, by the client's names for their places.
        more: how many there are beside those.
    """

    names: tuple[str, ...] = ()
    more: int = 0


ENFORCED = Unenforced()


@dataclass(slots=True, kw_only=True)
class Options:
    """A validated request but for its prompts; `max_tokens` None is no limit.

    The first choice of a prompt is sampled with `seed`, each other one with the next number: it is
    always set, so that the engine never falls back to its own constant one. With `beam_search` the
    `n` choices of a prompt are the best `n` beams of one engine request. `token_ids` says whether
    the answer shows the ids.
    """

    params: GenerationParams = field(default_factory=GenerationParams)
    seed: int
    n: int = 1
    max_tokens: int | None = None
    beam_search: bool = False
    echo: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    truncate_prompt: int | None = None
    """How many tokens may be left of a prompt; the others go at `truncation_side`."""
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: int | None = None
    """How many alternatives to tell with each token of a prompt, apart from the answer's text."""
    stream: bool = False
    token_ids: bool = False
    guide_param: str | None = None
    """The parameter that asked for the guide, for errors."""
    guide_parts: Callable[[], Sequence[tuple[Guide, str]]] = tuple
    """What the guide is made of: each part alone, with the parameter that it is of, for errors."""
    looser_guide: Guide | None = None
    """What to be content with where no engine can enforce the guide."""
    unenforced: Unenforced = ENFORCED
    logprobs_param: str = "logprobs"
    """The parameter that asked for log probabilities, for errors."""
    caller: Caller = field(default_factory=lambda: DEFAULT_CALLER)

    @property
    def ignores_ends(self) -> bool:
        """Whether end-of-sequence ids end nothing. At its end a guide leaves the engine nothing but
        these to choose from, and nothing may come behind them."""
        return self.ignore_eos and self.params.guide is None


@dataclass(slots=True, kw_only=True)
class Generation:
    """One engine request, ready to be sent: tokenized, within all limits, with an id of its own.

    `beams` is the beam width, 0 for sampling; the request then answers for as many choices.
    `echo` is the prompt's text where the answer begins with it. `end_id` ends the sequence and is
    not in the output; None goes on to `max_tokens`. `stop_ids` are the stop strings as token ids,
    as a help to the engine only (the text decides), plus further end-of-sequence ids. Of
    `later_end_ids` any one ends it behind `min_tokens`, by the text alone.
    """

    request_id: str
    prompt_ids: array[int]
    """int32, as they are sent."""
    max_tokens: int
    seed: int
    params: GenerationParams = field(default_factory=GenerationParams)
    stop_ids: tuple[tuple[int, ...], ...] = ()
    later_end_ids: frozenset[int] = frozenset()
    bad_ids: tuple[tuple[int, ...], ...] = ()
    end_id: int | None = None
    echo: str | None = None
    prompt_logprobs: int | None = None
    """How many alternatives to find for each token of the prompt; None for nothing of them."""
    beams: int = 0
    text: TextPrompt | None = None
    """For a model that takes text; `prompt_ids` are then what it makes of that."""
    forms: Mapping[object, TextPrompt | None] = field(default_factory=dict)
    """The kinds of replicas (`gateway.scheduling.kinds`) that can take it, and what of it is the
    `text` for each of them. Empty for what is sent to a replica without being asked which."""

    def for_variant(self, variant: object) -> Generation:
        """As a replica of this kind, which is one of `forms`, is sent it."""
        if len(self.forms) < 2:
            return self
        return replace(self, text=self.forms[variant])


class RunningChoice(Protocol):
    """A choice under way."""

    @property
    def tokens(self) -> int:
        """How many it has now."""

    def cut_short(self) -> None:
        """Ends it there, as at its limit."""


@dataclass(slots=True)
class Meter:
    """What a request has used: of ended choices, however they ended, and of `running` ones.

    `reused_tokens` are those of the prompt that were in the engine's cache, of the least cached
    choice. `finished` has the reason of each choice that came to its end.
    """

    sent_prompts: int = 0
    """The prompts that the engine was given: a bit for each place in the request."""
    tokens: int = 0
    unreported_tokens: int = 0
    """Of what was broken off: tokens that had come and were not read yet, and what beam searches
    and whole answers may have come to, of which the engine tells at the end only."""
    aborted_single_response: bool = False
    """True if an answer in one piece was broken off while its engine seemed to work on it."""
    running: list[RunningChoice] = field(default_factory=list)
    reused_tokens: int | None = None
    finished: list[FinishReason] = field(default_factory=list)
    fingerprints: dict[int, str] = field(default_factory=dict)
    """Of the models that have answered, by the place of the generation in the request, but for
    those of the batch's own fingerprint."""
    resumptions: int = 0
    """How often one of its choices has gone on at another replica."""
    first_token: float | None = None
    """When the first token of any choice came, in `time.perf_counter`; None in a beam search."""
    stops: Stops | None = None
    """Of choices that were left before their end; None where none was."""

    @property
    def tokens_now(self) -> int:
        """With those of choices under way."""
        return self.tokens + sum([running.tokens for running in self.running])

    def add(self, last: TextDelta) -> None:
        """Adds a choice by the last delta that there was of it."""
        self.tokens += last.tokens
        reused = last.stats.reused_tokens if last.stats else 0
        self.reused_tokens = (
            reused if self.reused_tokens is None else min(reused, self.reused_tokens)
        )
        if last.finish is not None:
            self.finished.append(last.finish)


@dataclass(slots=True, kw_only=True)
class Batch:
    """The generations of one request, one per choice: all of the first prompt, then the next.

    Each choice is an engine request of its own, so that a stop string ends one choice alone
    (`num_return_sequences` shares one id and one stop); only a beam search is one request for all
    choices of its prompt. `choices` counts all, `prompt_tokens` counts each prompt once.
    `deadline` is in the event loop's time, `timeout_s` seconds after the request came.
    `fingerprint` is of a model that may answer: which one does is known once it has.
    """

    request_id: str
    generations: list[Generation]
    prompts: int
    choices: int
    prompt_tokens: int
    fingerprint: str
    caller: Caller
    timeout_s: float
    deadline: float
    unenforced: Unenforced = ENFORCED
    meter: Meter = field(default_factory=Meter)
    prompt_logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    """Of the tokens of prompts, by the place of the generation that shows them."""
    prompt_locks: defaultdict[int, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    """Whose turn it is to ask for these, by the place of a prompt's first generation."""

    @property
    def arrived_at(self) -> float:
        """When the request came, in the event loop's time."""
        return self.deadline - self.timeout_s

    @property
    def first_token_by(self) -> float:
        """When its first token must have come, in the event loop's time."""
        within = self.caller.first_token_within
        return self.deadline if within is None else min(self.deadline, self.arrived_at + within)

    def fingerprint_of(self, choice: int) -> str:
        """Of the model that answers for this choice, as far as is known by now."""
        index = choice * len(self.generations) // self.choices
        return self.meter.fingerprints.get(index, self.fingerprint)

    @property
    def slots(self) -> int:
        """How much of the engine it takes: a place for each sequence that is generated."""
        return sum(generation.beams or 1 for generation in self.generations)

    @property
    def sent_prompt_tokens(self) -> int:
        """Of the prompts that the engine was given, each counted once."""
        of_prompt = len(self.generations) // self.prompts
        firsts = self.generations[::of_prompt]
        sent = [first for place, first in enumerate(firsts) if self.meter.sent_prompts >> place & 1]
        return sum([len(generation.prompt_ids) for generation in sent])

    def record_sent(self, index: int) -> None:
        """An engine was given the prompt of this generation."""
        self.meter.sent_prompts |= 1 << index * self.prompts // len(self.generations)
