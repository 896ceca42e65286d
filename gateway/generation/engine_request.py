"""A generation: one engine request, tokenized and within all limits."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gateway.generation.options import GenerationParams


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
