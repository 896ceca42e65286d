"""Data types of one engine request, which was tokenized and checked against all limits."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gateway.generation.options import GenerationParams


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """The prompt and its options for a model that takes text instead of token ids.

    Attributes:
        text: the prompt.
        stop: texts at which the engine stops: the stop strings and further end-of-sequence tokens.
            The gateway also searches the response for stop strings, because the engine may miss
            them.
        bad: the bad words, which the response must not contain.
        bias: (word, bias) pairs for `logit_bias`.
        restated: the text with which a response begins if the model repeats the prompt; "" if the
            model does not repeat prompts.
        single_response: True to ask for a non-streaming response.
    """

    text: str
    stop: tuple[str, ...] = ()
    bad: tuple[str, ...] = ()
    bias: tuple[tuple[str, float], ...] = ()
    restated: str = ""
    single_response: bool = False


@dataclass(slots=True, kw_only=True)
class Generation:
    """An engine request that is ready to be sent. It has a unique id.

    Attributes:
        beams: the beam width, which is also the number of returned choices; 0 without beam search.
        echo: the prompt's text if the response must begin with the prompt; otherwise None.
        end_id: the end-of-sequence id, at which the engine stops, and which is not in the output.
            None if the engine must continue after an end of sequence, up to `max_tokens` tokens.
        stop_ids: id sequences at which the engine stops: further end-of-sequence ids and the stop
            strings. The gateway also searches the text for stop strings, because the engine may
            miss them.
        later_end_ids: ids at which the gateway ends the response, but only after `min_tokens`
            tokens.
    """

    request_id: str
    prompt_ids: array[int]
    """Token ids as int32, the type that the engine takes."""
    max_tokens: int
    seed: int
    params: GenerationParams = field(default_factory=GenerationParams)
    stop_ids: tuple[tuple[int, ...], ...] = ()
    later_end_ids: frozenset[int] = frozenset()
    bad_ids: tuple[tuple[int, ...], ...] = ()
    end_id: int | None = None
    echo: str | None = None
    prompt_logprobs: int | None = None
    """Number of alternatives to report for each prompt token.

    None to report no log probabilities of the prompt.
    """
    beams: int = 0
    text: TextPrompt | None = None
    """The prompt for a model that takes text; None for a model that takes token ids.

    If the model takes text, it converts the text to the token ids in `prompt_ids` itself.
    """
    forms: Mapping[object, TextPrompt | None] = field(default_factory=dict)
    """Value of `text` for each model variant (group of equal replicas) that can run the request.

    The mapping is empty if the request is for one certain replica. `gateway.scheduling.kinds`
    defines model variants.
    """

    def for_variant(self, variant: object) -> Generation:
        """Return this generation with the value of `text` for replicas of `variant`.

        If `forms` has at least two variants, `variant` must be one of them. Otherwise, return this
        object unchanged.
        """
        if len(self.forms) < 2:
            return self
        return replace(self, text=self.forms[variant])
