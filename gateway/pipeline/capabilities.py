"""What of a request the model that was found can do; the rest is refused by the client's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.errors import UnsupportedParameter
from gateway.generation import Options
from gateway.triton.dialect import Dialect, TextModel
from gateway.triton.names import Thing


@dataclass(frozen=True, slots=True)
class _Needed:
    """A parameter that needs the model to have an input, when `asked` for."""

    param: str
    thing: Thing
    asked: Callable[[Options], object]


@dataclass(frozen=True, slots=True)
class _TokenOnly:
    """A parameter that a model which takes and gives text cannot serve."""

    param: str
    asked: Callable[[Options, TextModel], object]
    why: str


_NEEDED = (
    _Needed("frequency_penalty", "frequency_penalty", lambda o: o.sampling.frequency_penalty),
    _Needed("presence_penalty", "presence_penalty", lambda o: o.sampling.presence_penalty),
    _Needed(
        "repetition_penalty", "repetition_penalty", lambda o: o.sampling.repetition_penalty != 1
    ),
    _Needed("min_tokens", "min_tokens", lambda o: o.sampling.min_tokens),
    _Needed("logit_bias", "bias", lambda o: o.sampling.logit_bias),
    _Needed("bad_words", "bad_words", lambda o: o.bad_words),
    _Needed("stop_token_ids", "stop_words", lambda o: o.stop_token_ids),
    _Needed("ignore_eos", "end_id", lambda o: o.ignore_eos),
    _Needed("length_penalty", "length_penalty", lambda o: o.length_penalty != 1),
)
_TOKEN_ONLY = (
    _TokenOnly(
        "truncate_prompt_tokens",
        lambda o, _: o.truncate_prompt is not None,
        "the prompt is tokenized behind it",
    ),
    _TokenOnly("stop_token_ids", lambda o, _: o.stop_token_ids, "it shows no token ids"),
    _TokenOnly("return_token_ids", lambda o, _: o.token_ids, "it shows no token ids"),
    _TokenOnly(
        "skip_special_tokens",
        lambda o, text: not o.skip_special_tokens and text.skips_special_tokens,
        "it leaves special tokens out",
    ),
)


def check_served(dialect: Dialect, options: Options, *, chat: bool) -> None:
    """Raises UnsupportedParameter for the first parameter that this model cannot do."""
    if options.stream and not dialect.decoupled:
        raise UnsupportedParameter(
            f"stream: the model {dialect.model!r} is deployed without decoupled mode and answers "
            "once.",
            param="stream",
        )
    if dialect.text is not None:
        _check_text(dialect.text, dialect.model, options)
    for needed in _NEEDED:
        if needed.asked(options) and needed.thing not in dialect.inputs:
            raise UnsupportedParameter(
                f"{needed.param}: this release of the model {dialect.model!r} has no input for it.",
                param=needed.param,
            )
    _check_engine(dialect, options, chat=chat)


def _check_text(text: TextModel, model: str, options: Options) -> None:
    for only in _TOKEN_ONLY:
        if only.asked(options, text):
            raise UnsupportedParameter(
                f"{only.param} is not served through the model {model!r}: {only.why}.",
                param=only.param,
            )
    if options.logprobs is not None:
        raise UnsupportedParameter(
            f"{options.logprobs_param} is not served through the model {model!r}: it does not say "
            "which tokens they belong to.",
            param=options.logprobs_param,
        )


def _check_engine(dialect: Dialect, options: Options, *, chat: bool) -> None:
    if options.guide is not None and not dialect.guided:
        raise UnsupportedParameter(
            "Guided decoding is not set up in this engine, so response_format, structured_outputs "
            "and a required tool cannot be enforced.",
            param=options.guide_param,
        )
    if options.logprobs is not None and "log_probs" not in dialect.inputs:
        raise UnsupportedParameter(
            f"{options.logprobs_param}: this release of the model {dialect.model!r} has no input "
            "for it.",
            param=options.logprobs_param,
        )
    if options.echo and options.logprobs is not None and not dialect.context_logits:
        raise UnsupportedParameter(
            "echo with logprobs needs an engine that is built with gather_context_logits.",
            param="echo",
        )
    if options.beam_search and options.n > dialect.max_beam_width:
        raise UnsupportedParameter(
            f"use_beam_search: {options.n} beams asked for; this engine allows "
            f"{dialect.max_beam_width}.",
            param="use_beam_search",
        )
    if options.logprobs and not dialect.generation_logits:
        raise UnsupportedParameter(
            "top_logprobs needs an engine that is built with gather_generation_logits.",
            param="top_logprobs" if chat else "logprobs",
        )
