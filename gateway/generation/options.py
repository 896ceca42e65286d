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
"""Value of `truncate_prompt` that means: the longest prompt that leaves space for `max_tokens`."""


MAX_SEED = 2**63 - 1


PlainParameter = Literal["frequency_penalty", "presence_penalty", "repetition_penalty"]


@dataclass(frozen=True, slots=True)
class Guide:
    """A constraint on the text of an answer, in the form that the engine's guided decoding takes.

    `best_effort` has pairs of a JSON path in the schema and the client's name of the schema at that
    path. Keywords below these paths are left out if they cannot be enforced.
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
        include_stop: True to include the stop string in the answer.
        usage: True if the engine must report the number of cached tokens.
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
        """Return True if the likeliest token is always chosen."""
        # Tiny values count as 0. The engine would take them as float32, in which they are 0, and 0
        # means "not set" there.
        return (
            self.temperature < _GREEDY_THRESHOLD
            or self.top_p < _GREEDY_THRESHOLD
            or self.top_k == 1
        )

    @property
    def engine_stop(self) -> tuple[str, ...]:
        """Return the stop strings that the engine may match by itself.

        An engine searches all of its text. So return no strings if only a part of the text may be
        searched: after `min_tokens`, or after the reasoning.
        """
        if self.min_tokens or (self.message is not None and self.message.has_reasoning):
            return ()
        return self.stop


@dataclass(slots=True, kw_only=True)
class Caller:
    """The tenant of a request, with the values that decide about its queueing and time limits.

    Attributes:
        timeout_s: the client's time limit in seconds; None if the client set none, or if the
            gateway's limit is lower.
        first_token_within: maximum seconds to the first token. The request is refused if its first
            token is expected later.
        max_expected_wait_s: maximum expected seconds in the queue, if `first_token_within` is not
            set. The request is refused if a longer wait is expected.
        billed: True to count cached tokens even if the answer does not report them.
        isolated_cache: True to ignore hits in an engine's cache on prompts of other tenants. They
            are neither reported nor used for routing.
        guides: the treatment of the request's guides; see `Policy`.
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
        names: the first of these keywords, each with its path as the client would write it.
        more: the number of these keywords beside `names`.
    """

    names: tuple[str, ...] = ()
    more: int = 0


ENFORCED = Unenforced()


@dataclass(slots=True, kw_only=True)
class Options:
    """A validated request without its prompts.

    Choice i of a prompt is sampled with `seed` + i. The seed is always set, since the engine would
    otherwise use the same seed for all requests. With `beam_search`, the `n` choices of a prompt
    are the `n` best beams of one engine request. `max_tokens` None means no limit. `token_ids` is
    True to report token ids in the answer.
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
    """Maximum number of tokens of a prompt; more tokens are removed at `truncation_side`. None for
    no truncation."""
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: int | None = None
    """Number of alternatives to report for each token of a prompt, separately from the text. None
    to report none of the prompt's tokens."""
    stream: bool = False
    token_ids: bool = False
    guide_param: str | None = None
    """Name of the parameter that asked for the guide; used in error messages."""
    guide_parts: Callable[[], Sequence[tuple[Guide, str]]] = tuple
    """Callback for error messages: returns the parts of the guide, each with the name of the
    parameter that asked for the part."""
    looser_guide: Guide | None = None
    """A weaker guide to use if no engine can enforce `guide`."""
    unenforced: Unenforced = ENFORCED
    logprobs_param: str = "logprobs"
    """Name of the parameter that asked for log probabilities; used in error messages."""
    caller: Caller = field(default_factory=lambda: DEFAULT_CALLER)

    @property
    def ignores_ends(self) -> bool:
        """Return True if end-of-sequence ids do not end an answer.

        Return False with a guide: at the end of a guide, the engine can choose only such an id, and
        nothing may follow.
        """
        return self.ignore_eos and self.params.guide is None
