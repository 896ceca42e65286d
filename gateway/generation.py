"""Types of a request on its way from the API to the engine: validated, tokenized, then counted.

The answer comes back as the deltas of `gateway.deltas`. Every package between the API and Triton
may import these types, so this module knows nothing of HTTP, gRPC or a tokenizer.
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
"""Maximum number of choices in one request, over all its prompts."""
MODEL_MAXIMUM = -1
"""Prompt length limit that means the model's maximum: what it takes in addition to the answer's
`max_tokens`."""
MAX_SEED = 2**63 - 1


PlainParameter = Literal["frequency_penalty", "presence_penalty", "repetition_penalty"]


@dataclass(frozen=True, slots=True)
class Guide:
    """A constraint on the text, in the form that the engine's guided decoding takes.

    `best_effort` maps JSON paths of a schema to the client's names of these schemas. Keywords
    below these paths are left out if they cannot be enforced.
    """

    type: Kind
    text: str
    best_effort: tuple[tuple[str, str], ...] = ()


class Folders(Protocol):
    """The folders of one adapter version, for engines that read adapters from their own disk."""

    def at(self, endpoint: str) -> str | None:
        """Return the version's folder as that replica sees it, or None if the replica is not known
        to have it."""

    def using(self, endpoint: str) -> AbstractContextManager[object]:
        """Return a context manager that keeps the folder on the replica while a request names
        it."""

    async def wait_for_poll(self) -> None:
        """Return after the next poll of the replicas.

        Raises EngineError if no replica will ever have the version.
        """


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapter version of a request.

    Attributes:
        name: the label in metrics.
        task_id: the id by which the engine knows the version.
        nbytes: the size of the weights in bytes.
        weights: reads the tensors. Needed only if the engine does not hold the version.
        upload_slot: makes a context manager to hold from before `weights` is read until they are
            sent.
        folders: the version's folders, for engines that read adapters from their own disk.
        dtype: the data type of the weights.
        tp_size: the tp_size of engines that take these weights; None for any.
        tenant: the tenant of the request. Tenants share an engine's adapter budget.
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
    """The prompt and its options as sent to a model that takes text in place of token ids.

    `stop` holds the stop strings and further end-of-sequence tokens, only as a help to the engine.
    `bias` holds (word, bias) pairs. `restated` is the text that an answer begins with if it repeats
    the prompt. `single_response` asks for the answer in one response.
    """

    text: str
    stop: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    bias: tuple[tuple[str, float], ...] = ()
    restated: str = ""
    single_response: bool = False


@dataclass(slots=True, kw_only=True)
class GenerationParams:
    """The parameters that the client sets for every generation of its request.

    Sampling parameters have OpenAI's meaning.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 means no limit.
        plain: parameters that differ from their default and go unchanged to the model input of the
            same name.
        logit_bias: (token id, bias) pairs.
        stop: the stop strings.
        include_stop: show the stop string that was found.
        usage: the engine must count cached tokens.
        logprobs: the number of alternatives with each token's log probability; None for no log
            probabilities.
        length_penalty: the length penalty of a beam search.
        message: how to read the text of a chat; None for plain text.
        guide: the constraint that the text must match.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    plain: tuple[tuple[PlainParameter, float], ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
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
    def greedy(self) -> bool:
        """True if each token is the likeliest one."""
        # The engine takes these as float32, in which a tiny value is 0, and 0 means "not set".
        return (
            self.temperature < _GREEDY_THRESHOLD
            or self.top_p < _GREEDY_THRESHOLD
            or self.top_k == 1
        )

    @property
    def engine_stop(self) -> tuple[str, ...]:
        """Return the stop strings that the engine may match by itself.

        An engine matches them anywhere in its text. So return no strings if they count only in a
        part of the text: after `min_tokens`, or after the reasoning.
        """
        if self.min_tokens or (self.message is not None and self.message.has_reasoning):
            return ()
        return self.stop


@dataclass(slots=True, kw_only=True)
class Caller:
    """The tenant of a request and what decides about its queueing and its time limits.

    Attributes:
        timeout_s: the client's time limit, if it is below the gateway's.
        first_token_within: maximum seconds to the first token. The request is refused if it would
            miss that.
        max_expected_wait_s: maximum expected wait for a slot if `first_token_within` is not set.
            The request is refused if more is expected.
        billed: count cached tokens even if the answer does not report them.
        isolated_cache: do not report engine cache hits on other tenants' prompts, and do not route
            by them.
        guides: the policy for the request's guides.
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
        names: the first ones, by the client's names of their paths.
        more: the number of further ones.
    """

    names: tuple[str, ...] = ()
    more: int = 0


ENFORCED = Unenforced()


@dataclass(slots=True, kw_only=True)
class Options:
    """A validated request without its prompts.

    The first choice of a prompt is sampled with `seed`, each further one with the next number. The
    seed is always set, so that the engine never falls back to its own constant one. With
    `beam_search` the `n` choices of a prompt are the best `n` beams of one engine request.
    `max_tokens` None is no limit. `token_ids` adds the ids to the answer.
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
    """Maximum number of tokens of a prompt; further ones are cut off at `truncation_side`."""
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: int | None = None
    """Number of alternatives to report with each token of a prompt, apart from the answer's
    text."""
    stream: bool = False
    token_ids: bool = False
    guide_param: str | None = None
    """Name of the parameter that asked for the guide, for errors."""
    guide_parts: Callable[[], Sequence[tuple[Guide, str]]] = tuple
    """Callback: returns the parts of the guide, each with its parameter's name, for errors."""
    looser_guide: Guide | None = None
    """A weaker guide to use if no engine can enforce `guide`."""
    unenforced: Unenforced = ENFORCED
    logprobs_param: str = "logprobs"
    """Name of the parameter that asked for log probabilities, for errors."""
    caller: Caller = field(default_factory=lambda: DEFAULT_CALLER)

    @property
    def ignores_ends(self) -> bool:
        """Return True if end-of-sequence ids end nothing.

        False with a guide: at its end the engine can only choose such an id, and nothing may
        follow.
        """
        return self.ignore_eos and self.params.guide is None


@dataclass(slots=True, kw_only=True)
class Generation:
    """An engine request, ready to be sent: tokenized, within all limits, with an id of its own.

    Attributes:
        beams: the beam width; 0 for sampling. The request returns as many choices.
        echo: the prompt's text if the answer begins with it.
        end_id: the id that ends the sequence and is not in the output; None generates `max_tokens`.
        stop_ids: the stop strings as token ids, only as a help to the engine (the text decides),
            and further end-of-sequence ids.
        later_end_ids: ids of which each ends the answer after `min_tokens`, by the text alone.
    """

    request_id: str
    prompt_ids: array[int]
    """Token ids as int32, in the form that is sent."""
    max_tokens: int
    seed: int
    params: GenerationParams = field(default_factory=GenerationParams)
    stop_ids: tuple[tuple[int, ...], ...] = ()
    later_end_ids: frozenset[int] = frozenset()
    bad_ids: tuple[tuple[int, ...], ...] = ()
    end_id: int | None = None
    echo: str | None = None
    prompt_logprobs: int | None = None
    """Number of alternatives for each token of the prompt; None if the prompt is not scored."""
    beams: int = 0
    text: TextPrompt | None = None
    """The text for a model that takes text; `prompt_ids` are then the ids that the model makes of
    it."""
    forms: Mapping[object, TextPrompt | None] = field(default_factory=dict)
    """The text to send, by model variant (`gateway.scheduling.kinds`) that can take the request.
    Empty for a request that is sent to a replica without choosing one."""

    def for_variant(self, variant: object) -> Generation:
        """Return the generation in the form for replicas of `variant`, which must be in `forms`."""
        if len(self.forms) < 2:
            return self
        return replace(self, text=self.forms[variant])


class RunningChoice(Protocol):
    """A choice that is being generated."""

    @property
    def tokens(self) -> int:
        """Number of tokens so far."""

    def cut_short(self) -> None:
        """End the choice now, as if it had reached its token limit."""


@dataclass(slots=True)
class Meter:
    """Usage of a request: ended choices, however they ended, and `running` ones.

    `reused_tokens` are the prompt tokens that were in the engine's cache, of the choice with the
    fewest. `finished` holds the finish reason of each choice that came to its end.
    """

    sent_prompts: int = 0
    """Prompts that the engine was given, as a bit mask over their positions in the request."""
    tokens: int = 0
    unreported_tokens: int = 0
    """Estimated tokens of aborted choices that were never read. Includes the possible output of
    beam searches and single responses, which the engine reports only at their end."""
    aborted_single_response: bool = False
    """True if an answer in a single response was aborted while its engine seemed to work on it."""
    running: list[RunningChoice] = field(default_factory=list)
    reused_tokens: int | None = None
    finished: list[FinishReason] = field(default_factory=list)
    fingerprints: dict[int, str] = field(default_factory=dict)
    """Fingerprints of the models that have answered, by the index of the generation. Those equal to
    the batch's own are left out."""
    resumptions: int = 0
    """Number of times that a choice was resumed on another replica."""
    first_token: float | None = None
    """Time of the first token of any choice, in `time.perf_counter`; None in a beam search."""
    stops: Stops | None = None
    """The stops of choices that were abandoned before their end; None if there were none."""

    @property
    def tokens_now(self) -> int:
        """Return the number of tokens, including those of running choices."""
        return self.tokens + sum([running.tokens for running in self.running])

    def add(self, last: TextDelta) -> None:
        """Add a choice, given its last delta."""
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

    Each choice is an engine request of its own, so that a stop string ends only one choice
    (`num_return_sequences` shares one id and one stop). Only a beam search is one request for all
    choices of its prompt. `choices` counts all choices; `prompt_tokens` counts each prompt once.
    `deadline` is in the event loop's time, `timeout_s` seconds after the request arrived.
    `fingerprint` is that of a model that may answer; the real one is known once it has answered.
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
    """Log probabilities of prompt tokens, by the index of the generation that shows them."""
    prompt_locks: defaultdict[int, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    """Locks that let one choice of a prompt ask for these, by the index of the prompt's first
    generation."""

    @property
    def arrived_at(self) -> float:
        """Return the time at which the request arrived, in the event loop's time."""
        return self.deadline - self.timeout_s

    @property
    def first_token_by(self) -> float:
        """Return the latest time for the first token, in the event loop's time."""
        within = self.caller.first_token_within
        return self.deadline if within is None else min(self.deadline, self.arrived_at + within)

    def fingerprint_of(self, choice: int) -> str:
        """Return the fingerprint of the model that answers this choice, as far as known by now."""
        index = choice * len(self.generations) // self.choices
        return self.meter.fingerprints.get(index, self.fingerprint)

    @property
    def slots(self) -> int:
        """Return the number of engine slots that the request takes, one for each generated
        sequence."""
        return sum(generation.beams or 1 for generation in self.generations)

    @property
    def sent_prompt_tokens(self) -> int:
        """Return the number of tokens of the prompts that the engine was given, each prompt counted
        once."""
        of_prompt = len(self.generations) // self.prompts
        firsts = self.generations[::of_prompt]
        sent = [first for place, first in enumerate(firsts) if self.meter.sent_prompts >> place & 1]
        return sum([len(generation.prompt_ids) for generation in sent])

    def record_sent(self, index: int) -> None:
        """Record that an engine was given the prompt of this generation."""
        self.meter.sent_prompts |= 1 << index * self.prompts // len(self.generations)
