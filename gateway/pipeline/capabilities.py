"""Check of a request's parameters against the capabilities of the served model.

The errors use the parameter names of the client's API.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import UnsupportedParameter
from gateway.generation.options import Options
from gateway.triton.model_capabilities import ModelCapabilities, TextModel
from gateway.triton.names import LogicalInput


@dataclass(frozen=True, slots=True)
class _InputRequirement:
    """A request parameter that needs an optional input of the Triton model.

    `logical` is the gateway's name of the input. The parameter is supported only if the model has
    this input. `is_requested` returns a true value if the request uses the parameter.
    """

    param: str
    logical: LogicalInput
    is_requested: Callable[[Options], object]


@dataclass(frozen=True, slots=True)
class _TokenModeOnly:
    """A request parameter that is not supported by models with text input and output.

    Such a model takes and returns text instead of token ids. `is_requested` returns a true value if
    the request uses the parameter. `reason` is part of the error message.
    """

    param: str
    is_requested: Callable[[Options, TextModel], object]
    reason: str


_INPUT_REQUIREMENTS = (
    _InputRequirement("min_tokens", "min_tokens", lambda o: o.params.min_tokens),
    _InputRequirement("logit_bias", "bias", lambda o: o.params.logit_bias),
    _InputRequirement("bad_words", "bad_words", lambda o: o.bad_words),
    _InputRequirement("stop_token_ids", "stop_words", lambda o: o.stop_token_ids),
    _InputRequirement("ignore_eos", "end_id", lambda o: o.ignore_eos),
    _InputRequirement("length_penalty", "length_penalty", lambda o: o.params.length_penalty != 1),
)
_TOKEN_MODE_ONLY = (
    _TokenModeOnly(
        "truncate_prompt_tokens",
        lambda o, _: o.truncate_prompt is not None,
        "the prompt is tokenized behind it",
    ),
    _TokenModeOnly("stop_token_ids", lambda o, _: o.stop_token_ids, "it shows no token ids"),
    _TokenModeOnly(
        "prompt_logprobs", lambda o, _: o.prompt_logprobs is not None, "it shows no token ids"
    ),
    _TokenModeOnly("return_token_ids", lambda o, _: o.token_ids, "it shows no token ids"),
    _TokenModeOnly(
        "skip_special_tokens",
        lambda o, text: not o.params.skip_special_tokens and text.skips_special_tokens,
        "it leaves special tokens out",
    ),
)


def check_supported(capabilities: ModelCapabilities, options: Options, *, chat: bool) -> None:
    """Raise UnsupportedParameter for the first parameter that this model does not support."""
    if options.stream and not capabilities.decoupled:
        raise UnsupportedParameter(
            f"stream: the model {capabilities.model!r} is deployed without decoupled mode and "
            "answers once.",
            param="stream",
        )
    if capabilities.text is not None:
        _check_text(capabilities.text, capabilities.model, options)
    for name, _ in options.params.plain:
        if name not in capabilities.inputs:
            raise _without_input(capabilities, name)
    for needed in _INPUT_REQUIREMENTS:
        if needed.logical not in capabilities.inputs and needed.is_requested(options):
            raise _without_input(capabilities, needed.param)
    _check_engine(capabilities, options, chat=chat)


def _without_input(capabilities: ModelCapabilities, param: str) -> UnsupportedParameter:
    return UnsupportedParameter(
        f"{param}: this release of the model {capabilities.model!r} has no input for it.",
        param=param,
    )


def _check_text(text: TextModel, model: str, options: Options) -> None:
    for only in _TOKEN_MODE_ONLY:
        if only.is_requested(options, text):
            raise UnsupportedParameter(
                f"{only.param} is not served through the model {model!r}: {only.reason}.",
                param=only.param,
            )
    if options.params.logprobs is not None:
        raise UnsupportedParameter(
            f"{options.logprobs_param} is not served through the model {model!r}: it does not say "
            "which tokens they belong to.",
            param=options.logprobs_param,
        )


def _check_engine(capabilities: ModelCapabilities, options: Options, *, chat: bool) -> None:
    if options.params.guide is not None and capabilities.guides is None:
        raise UnsupportedParameter(
            "Guided decoding is not set up in this engine, so response_format, structured_outputs "
            "and a required tool cannot be enforced.",
            param=options.guide_param,
        )
    if options.params.logprobs is not None and "log_probs" not in capabilities.inputs:
        raise _without_input(capabilities, options.logprobs_param)
    if options.echo and options.params.logprobs is not None and not capabilities.context_logits:
        raise UnsupportedParameter(
            "echo with logprobs needs an engine that is built with gather_context_logits.",
            param="echo",
        )
    if options.prompt_logprobs is not None and not capabilities.context_logits:
        raise UnsupportedParameter(
            "prompt_logprobs needs an engine that is built with gather_context_logits.",
            param="prompt_logprobs",
        )
    if options.beam_search:
        _check_beams(capabilities, options.n)
    if options.params.logprobs and not capabilities.generation_logits:
        raise UnsupportedParameter(
            "top_logprobs needs an engine that is built with gather_generation_logits.",
            param="top_logprobs" if chat else "logprobs",
        )


def _check_beams(capabilities: ModelCapabilities, beams: int) -> None:
    allowed, why = capabilities.max_beam_width, ""
    if capabilities.text is not None and capabilities.text.accumulates and allowed > 1:
        why = f", but {capabilities.model!r} with accumulate_tokens 1"
    if beams > (1 if why else allowed):
        raise UnsupportedParameter(
            f"use_beam_search: {beams} beams asked for; this engine allows {allowed}{why}.",
            param="use_beam_search",
        )
