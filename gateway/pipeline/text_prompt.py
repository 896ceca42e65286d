"""Prompts for models that take text: find a text that the model tokenizes to the intended ids.

Triton's preprocessing model may be configured to add special tokens (such as BOS) before each text.
A rendered chat contains these tokens already, so they must not be added again. The prompt of a
completion does not contain them, so they must be added. The gateway therefore sends the text with
or without special tokens at its beginning, so that the model gets the intended ids.

If preprocessing adds special tokens that the chat template does not write, neither text gives the
intended ids. The gateway then sends the unchanged text, and counts the ids that preprocessing makes
of this text.
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

# CPU cost of `_find_word` for one token. The unit is the cost of tokenizing one character.
_CHARS_PER_WORD = 20


class Encode(Protocol):
    """Function that tokenizes a text in the same way as `Prompts.encode`. It may have a cache."""

    def __call__(
        self, text: str | GuardedText, *, add_special_tokens: bool
    ) -> Awaitable[array[int]]: ...


async def fit_text(
    prompts: Prompts, text: str, model: TextModel, encode: Encode, *, chat: bool
) -> tuple[str, array[int]]:
    """Return the text to send for a prompt, and the token ids that the model makes of this text.

    Raise Overloaded if too much text waits to be tokenized.
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
    """Return a text that the model tokenizes to these ids. Return None if no such text is found.

    Raise Overloaded if too much text waits to be tokenized.
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
    """Return the prompt and the options for a model that takes text instead of token ids.

    Args:
        prompts: the tokenizer.
        text: the text to send.
        prompt_ids: the token ids to which the model's preprocessing converts `text`.
        model: the model that takes text.
        options: the options of the request.
        restates: True if the model may repeat the prompt at the beginning of its response.

    Raises:
        UnsupportedParameter: a token in `logit_bias` corresponds to no word. Also raised if special
            tokens mark tool calls or reasoning, but the model omits special tokens from its
            response.
        Overloaded: too much text waits to be tokenized.
    """
    _check_markers(prompts, model, options)
    # An engine accepts only one end-of-sequence token. Send all other tokens that end the response
    # as stop words, even with `min_tokens`. The model does not return the text of these tokens, so
    # the gateway could not detect the end itself.
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
        # The engine may miss a stop string, because the same text can consist of other token ids.
        # With stop strings, the response is therefore streamed, so that the gateway can stop the
        # engine.
        single_response=model.prefers_single_response
        and not options.stream
        and not options.params.stop,
    )


def _check_markers(prompts: Prompts, model: TextModel, options: Options) -> None:
    form = options.params.message
    # A guided response with tool calls is JSON without special tokens, so there is nothing to
    # check.
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
    """Return a (word, bias) pair for each token in `logit_bias`.

    The word is the text of the token. Triton's preprocessing model tokenizes the word again, and
    its tokenizer may add special tokens. A word is valid only if the result is exactly the token in
    `logit_bias`, without any other token. Raise UnsupportedParameter if a token has no valid word.
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
    """Return the text of a token, or None if this text is encoded to other tokens.

    `special` is True to encode the text with the special tokens that the tokenizer adds.
    """
    word: str = prompts.tokenizer.decode([token_id], skip_special_tokens=False)
    found = prompts.tokenizer.encode(word, add_special_tokens=special).ids
    return word if found == [token_id] else None
