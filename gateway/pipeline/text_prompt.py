"""Prompts for models that take text: the text that the model tokenizes to the intended ids.

Triton's preprocessing model adds special tokens before a text or not, by its configuration. The
rendered chat contains the special tokens already, so preprocessing must not add them again. The
prompt of a completion needs those that the tokenizer adds. So the text is sent either with or
without special tokens at its beginning, whichever results in the intended ids. If both fail
(because a template lacks the special tokens that preprocessing adds), the text is sent unchanged,
and the ids that preprocessing makes of it are counted.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable
from functools import partial
from typing import Protocol

from gateway.errors import UnsupportedParameter
from gateway.generation.engine_request import TextPrompt
from gateway.generation.options import Options
from gateway.tokenization.bad_words import with_and_without_space
from gateway.tokenization.control_tokens import GuardedText
from gateway.tokenization.prompts import Prompts
from gateway.triton.model_capabilities import TextModel

# CPU cost of finding the word of a token, as a number of characters whose tokenizing costs as much.
_CHARS_PER_WORD = 20


class Encode(Protocol):
    """Function like `Prompts.encode` for one request, which may cache the ids of texts."""

    def __call__(
        self, text: str | GuardedText, *, add_special_tokens: bool
    ) -> Awaitable[array[int]]: ...


async def fit_text(
    prompts: Prompts, text: str, model: TextModel, encode: Encode, *, chat: bool
) -> tuple[str, array[int]]:
    """Return the text to send for a prompt, and the token ids that the model makes of it.

    Raises Overloaded if too much text waits to be tokenized.
    """
    adds = model.adds_special_tokens
    opening = prompts.opening()
    meant = await encode(text, add_special_tokens=not chat)
    if not opening:
        return text, meant  # no special tokens to add
    for candidate in (text, text.removeprefix(opening), opening + text):
        ids = await encode(candidate, add_special_tokens=adds)
        if ids == meant:
            return candidate, ids
    return text, await encode(text, add_special_tokens=adds)


async def text_of_ids(
    prompts: Prompts, ids: array[int], model: TextModel, encode: Encode, *, tenant: str
) -> str | None:
    """Return a text that the model tokenizes to these ids, or None if no such text is known.

    Raises Overloaded if too much text waits to be tokenized.
    """
    text = await prompts.decode_offloaded(ids, tenant=tenant)
    for candidate in (text, text.removeprefix(prompts.opening())):
        found = await encode(candidate, add_special_tokens=model.adds_special_tokens)
        if found == ids:
            return candidate
    return None


async def text_prompt(
    prompts: Prompts,
    text: str,
    prompt_ids: array[int],
    model: TextModel,
    options: Options,
    *,
    restates: bool,
) -> TextPrompt:
    """Return the prompt and the options in the form that a model takes that takes text.

    Args:
        prompts: the tokenizer.
        text: the text to send.
        prompt_ids: the ids that the model makes of `text`.
        model: the model that takes text.
        options: the options of the request.
        restates: True if an answer may begin with the prompt.

    Raises:
        UnsupportedParameter: no word is tokenized to a biased token, or the answer would not show
            the special tokens that mark tool calls or reasoning.
        Overloaded: too much text waits to be tokenized.
    """
    _check_markers(prompts, model, options)
    # Send further end ids even with `min_tokens`: the answer's text does not show these tokens, so
    # the gateway could not end the answer at them.
    stop = options.params.engine_stop + tuple(
        word
        for token_id in prompts.further_end_ids(options)
        if (word := _find_word(prompts, token_id, special=False)) is not None
    )
    tenant = options.caller.tenant
    chars = _CHARS_PER_WORD * len(options.params.logit_bias)
    bias = await prompts.threads.run(tenant, chars, partial(_bias_words, prompts, options))
    restated = ""
    if restates:
        skip = model.skips_special_tokens
        restated = await prompts.decode_offloaded(
            prompt_ids, skip_special_tokens=skip, tenant=tenant
        )
    return TextPrompt(
        text=text,
        stop=stop,
        bad=with_and_without_space(options.bad_words),
        bias=bias,
        restated=restated,
        # With stop strings, stream the answer, so that the gateway can end it. The engine may write
        # a stop string with other ids, and continue.
        single_response=model.prefers_single_response
        and not options.stream
        and not options.params.stop,
    )


def _check_markers(prompts: Prompts, model: TextModel, options: Options) -> None:
    form = options.params.message
    # Guided answers with calls are JSON and have no markers.
    if form is None or form.guided or not model.skips_special_tokens:
        return
    added = prompts.tokenizer.get_added_tokens_decoder()
    special = {token.content for token in added.values() if token.special}
    if special.intersection(form.reasoning or ()):
        raise UnsupportedParameter(
            "messages: this model marks its reasoning by special tokens, which the served text "
            "model leaves out: reasoning and answer could not be distinguished.",
            param="messages",
        )
    if special.intersection(form.markers()):
        if form.channel is not None:
            raise UnsupportedParameter(
                "messages: this model marks the channels of its answers by special tokens, which "
                "the served text model leaves out; only guided answers can be served.",
                param="messages",
            )
        raise UnsupportedParameter(
            "tools: this model marks calls by special tokens, which the served text model leaves "
            "out; only a required or named call can be served.",
            param="tools",
        )


def _bias_words(prompts: Prompts, options: Options) -> tuple[tuple[str, float], ...]:
    """Return a (word, bias) pair for each biased token, with the word that is this token alone.

    Raises UnsupportedParameter if there is no such word. Preprocessing encodes the words with
    special tokens.
    """
    words = []
    for token_id, bias in options.params.logit_bias:
        word = _find_word(prompts, token_id, special=True)
        if word is None:
            raise UnsupportedParameter(
                f"logit_bias: token {token_id} cannot be biased through a model that takes words: "
                "no word is this token alone.",
                param="logit_bias",
            )
        words.append((word, bias))
    return tuple(words)


def _find_word(prompts: Prompts, token_id: int, *, special: bool) -> str | None:
    """Return the text that is tokenized to this token alone, or None if there is no such text."""
    word: str = prompts.tokenizer.decode([token_id], skip_special_tokens=False)
    found = prompts.tokenizer.encode(word, add_special_tokens=special).ids
    return word if found == [token_id] else None
