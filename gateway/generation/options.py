"""Validated options of a client request. Their texts have not been tokenized yet."""

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
"""Value of `Options.truncate_prompt` to truncate a prompt to the maximum length of the model.

The truncated prompt leaves `max_tokens` tokens for the response.
"""


MAX_SEED = 2**63 - 1


PlainParameter = Literal["frequency_penalty", "presence_penalty", "repetition_penalty"]


@dataclass(frozen=True, slots=True)
class Guide:
    """A constraint on generated text for guided decoding, such as a JSON schema or a regex.

    `best_effort` lists the parts of a JSON schema in which keywords may be dropped if the engine
    cannot enforce them. Each entry has two paths of such a part: its JSON path in `text`, and its
    path in the client's request.
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
        top_k: number of most likely tokens to sample from; 0 means no limit.
        plain: (name, value) pairs of parameters that differ from their default. Each value is sent
            unchanged in the model input of the same name.
        logit_bias: (token id, bias) pairs.
        stop: the stop strings.
        include_stop: True to include the stop string in the response.
        usage: True if the engine must report the number of cached prompt tokens.
        logprobs: the number of alternatives with each token's log probability; None for no log
            probabilities.
        length_penalty: the length penalty of a beam search.
        message: the format of reasoning and tool calls in a chat response; None for plain text.
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

        An engine searches all generated text, including the reasoning and the first `min_tokens`
        tokens. The result is therefore empty if stop strings must not apply to one of these parts.
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
        billed: True if the usage is recorded. The cached prompt tokens are then counted even if the
            response does not report them.
        isolated_cache: True if the client must not find out which prompts of other tenants an
            engine has cached. The response then does not report the number of cached tokens, and
            the request is routed only by the cached prompts of the same tenant.
        guides: "checked" or "unchecked" if the tenant may use guided decoding, otherwise "none";
            see `guides.kinds.Policy`.
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
        names: some of the keywords, each with its path in the client's request.
        more: the number of keywords that are not enforced and not in `names`.
    """

    names: tuple[str, ...] = ()
    more: int = 0


ENFORCED = Unenforced()


@dataclass(slots=True, kw_only=True)
class Options:
    """A validated request without its prompts.

    Attributes:
        seed: seed of the first choice; choice i of a prompt is sampled with `seed` + i. If a client
            sets no seed, the seed is random. The engine's default seed would give all requests the
            same samples.
        n: number of choices for each prompt.
        max_tokens: maximum number of tokens of each choice; None means no limit.
        beam_search: True to return the `n` best beams of one engine request as choices.
        token_ids: True to report token ids in the response.
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
    """Number of alternatives to report for each prompt token; None for no log probabilities.

    The log probabilities are reported in a separate field of the response, not with its text.
    """
    stream: bool = False
    token_ids: bool = False
    guide_param: str | None = None
    """Name of the parameter that asked for guided decoding; used in error messages."""
    guide_parts: Callable[[], Sequence[tuple[Guide, str]]] = tuple
    """Callback that returns the guides that were combined into `params.guide`.

    Each guide comes with the name of the request parameter that asked for it. The names are used in
    error messages.
    """
    looser_guide: Guide | None = None
    """A less strict guide to use if the engine cannot enforce `params.guide`.

    None to refuse the request in this case.
    """
    unenforced: Unenforced = ENFORCED
    logprobs_param: str = "logprobs"
    """Name of the parameter that asked for log probabilities; used in error messages."""
    caller: Caller = field(default_factory=lambda: DEFAULT_CALLER)

    @property
    def ignores_ends(self) -> bool:
        """True if a response continues after an end-of-sequence id.

        The value is always False with a guide. After the text matches the guide completely, the
        engine can only choose an end-of-sequence id, so the response must end there.
        """
        return self.ignore_eos and self.params.guide is None
