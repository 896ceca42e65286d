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
"""Maximum number of choices in one request, for all prompts together."""


MODEL_MAXIMUM = -1
"""Value of `truncate_prompt`: truncate only as far as `max_tokens` tokens of answer require."""


MAX_SEED = 2**63 - 1


PlainParameter = Literal["frequency_penalty", "presence_penalty", "repetition_penalty"]


@dataclass(frozen=True, slots=True)
class Guide:
    """A constraint on the text of an answer for guided decoding, such as a JSON schema or a regex.

    `best_effort` has (JSON path in the schema, name in the client's request) pairs. Keywords below
    these paths are dropped if the engine cannot enforce them.
    """

    type: Kind
    text: str
    best_effort: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True, kw_only=True)
class GenerationParams:
    """The parameters that a client sets for every generation of its request.

    Sampling parameters have the same meaning as in the OpenAI API.

    Attributes:
        temperature: sampling temperature; 0 means greedy decoding.
        top_k: 0 means no limit.
        plain: (name, value) pairs of parameters that differ from their default. Each value goes
            unchanged to the model input of the same name.
        logit_bias: (token id, bias) pairs.
        stop: the stop strings.
        include_stop: True to include the stop string in the answer.
        usage: True if the engine must report the number of cached tokens.
        logprobs: the number of alternatives with each token's log probability; None for no log
            probabilities.
        length_penalty: the length penalty of a beam search.
        message: how to parse reasoning and tool calls in the text of a chat; None for plain text.
        guide: the constraint that the text must match; None for free text.
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
        """True if the most likely token is always chosen."""
        # Treat tiny values like 0. In the engine's float32 they would become 0, which the engine
        # takes as "not set".
        return (
            self.temperature < _GREEDY_THRESHOLD
            or self.top_p < _GREEDY_THRESHOLD
            or self.top_k == 1
        )

    @property
    def engine_stop(self) -> tuple[str, ...]:
        """Stop strings that can be sent to the engine.

        An engine searches its entire text. The result is therefore empty if stop strings count only
        after `min_tokens` or only after the reasoning.
        """
        if self.min_tokens or (self.message is not None and self.message.has_reasoning):
            return ()
        return self.stop


@dataclass(slots=True, kw_only=True)
class Caller:
    """The tenant that sent a request, with settings for its queueing and time limits.

    Attributes:
        timeout_s: the client's time limit in seconds. None if the client set no limit, or if the
            gateway's limit is lower.
        first_token_within: maximum seconds to the first token. The request is refused if its first
            token is expected later.
        max_expected_wait_s: maximum expected seconds in the queue, if `first_token_within` is not
            set. The request is refused if a longer wait is expected.
        billed: True to count cached tokens even if the answer does not report them.
        isolated_cache: True to ignore cache hits on prompts of other tenants. Such hits are neither
            reported nor used for routing.
        guides: "checked" or "unchecked" if the tenant may use guided decoding, otherwise "none";
            see `Policy`.
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
    """The keywords of a client's JSON schema that are not enforced.

    Attributes:
        names: the first of these keywords, each with its path in the client's request.
        more: the number of further keywords that are not in `names`.
    """

    names: tuple[str, ...] = ()
    more: int = 0


ENFORCED = Unenforced()


@dataclass(slots=True, kw_only=True)
class Options:
    """A validated request without its prompts.

    Attributes:
        seed: seed of the first choice; choice i of a prompt is sampled with `seed` + i. A client
            that sets no seed gets a random one, because the engine has the same default for all.
        n: number of choices for each prompt.
        max_tokens: maximum number of tokens of each choice; None means no limit.
        beam_search: True to return the `n` best beams of one engine request as choices.
        token_ids: True to report token ids in the answer.
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
    """Maximum number of tokens of a prompt; None for no truncation.

    Tokens of a longer prompt are removed at `truncation_side`."""
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: int | None = None
    """Number of alternatives to report for each prompt token, in a field beside the answer's text.

    None to report no log probabilities of the prompt."""
    stream: bool = False
    token_ids: bool = False
    guide_param: str | None = None
    """Name of the parameter that asked for the guide; used in error messages."""
    guide_parts: Callable[[], Sequence[tuple[Guide, str]]] = tuple
    """Callback that returns the guides of which `params.guide` is combined.

    Each comes with the name of the request parameter that asked for it. Used in error messages."""
    looser_guide: Guide | None = None
    """A less strict guide to use if the engine cannot enforce `params.guide`; None to refuse."""
    unenforced: Unenforced = ENFORCED
    logprobs_param: str = "logprobs"
    """Name of the parameter that asked for log probabilities; used in error messages."""
    caller: Caller = field(default_factory=lambda: DEFAULT_CALLER)

    @property
    def ignores_ends(self) -> bool:
        """True if an answer continues after an end-of-sequence id.

        Always False with a guide: after a complete match, the engine can only choose an
        end-of-sequence id, so the answer must end there.
        """
        return self.ignore_eos and self.params.guide is None
