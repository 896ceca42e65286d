"""Options of a request: validated, not yet tokenized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gateway.generation.lora import Lora
from gateway.parsers.message import MessageForm
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
