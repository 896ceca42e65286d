"""The type of one engine request, tokenized and within all limits."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gateway.generation.options import GenerationParams


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """The prompt and its options as sent to a model that takes text in place of token ids.

    Attributes:
        text: the prompt.
        stop: the stop strings and further end-of-sequence tokens. They only help the engine to end
            early; the gateway searches the answer itself.
        bad: the bad words.
        bias: (word, bias) pairs.
        restated: the text with which the answer begins if the model repeats the prompt.
        single_response: True to ask for the answer in one response.
    """

    text: str
    stop: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    bias: tuple[tuple[str, float], ...] = ()
    restated: str = ""
    single_response: bool = False


@dataclass(slots=True, kw_only=True)
class Generation:
    """An engine request, ready to be sent: tokenized, within all limits, with an id of its own.

    Attributes:
        beams: the beam width, which is also the number of returned choices; 0 for sampling.
        echo: the prompt's text if the answer begins with the prompt; otherwise None.
        end_id: the id that ends the sequence and is not in the output; None to generate
            `max_tokens` tokens.
        stop_ids: further end-of-sequence ids, and the stop strings as token ids. The latter only
            help the engine to end early; the gateway searches the text itself.
        later_end_ids: ids at which the gateway itself ends the answer, after `min_tokens`.
    """

    request_id: str
    prompt_ids: array[int]
    """Token ids as int32, which is the type that is sent."""
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
    """The prompt for a model that takes text; None for a model that takes ids. `prompt_ids` are the
    ids that the model makes of this text."""
    forms: Mapping[object, TextPrompt | None] = field(default_factory=dict)
    """The prompt as text, by model variant that can take the request; None for a variant that takes
    ids. Empty for a request that is sent to a given replica. `gateway.scheduling.kinds` defines the
    variants."""

    def for_variant(self, variant: object) -> Generation:
        """Return the generation with the prompt in the form that replicas of `variant` take.

        If `forms` has several variants, `variant` must be one of them.
        """
        if len(self.forms) < 2:
            return self
        return replace(self, text=self.forms[variant])
