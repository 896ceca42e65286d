"""Tokenization of one prompt, and selection of the model variants that can process the prompt.

A model variant is a group of replicas with equal capabilities. Variants may have different length
limits. Some variants take token ids, and others take text.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeAlias, TypeVar

from gateway.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from gateway.generation.engine_request import TextPrompt
from gateway.generation.options import MODEL_MAXIMUM, Options
from gateway.pipeline.refusals import VariantRefusals
from gateway.pipeline.text_prompt import Encode, fit_text, text_of_ids, text_prompt
from gateway.scheduling.kinds import ModelVariant
from gateway.service import Service
from gateway.tokenization.control_tokens import GuardedText
from gateway.tokenization.prompts import Prompts
from gateway.triton.model_capabilities import ModelCapabilities, TextModel

Prompt = str | GuardedText | list[int]
PromptInput: TypeAlias = "str | GuardedText | array[int]"
"""A prompt as text, or as token ids that are in the vocabulary and already truncated."""

Ids = TypeVar("Ids", list[int], "array[int]")


@dataclass(slots=True)
class FittedPrompt:
    """A prompt that fits at least one model variant.

    Attributes:
        ids: the token ids (int32).
        max_tokens: the maximum number of tokens to generate for each choice.
        echo: the text of the prompt if the response must begin with the prompt; otherwise None.
        forms: maps each variant that can take the prompt to the text to send. The value is None for
            a variant that takes `ids`.
    """

    ids: array[int]
    max_tokens: int
    echo: str | None
    forms: Mapping[object, TextPrompt | None]


@dataclass(slots=True)
class _VariantFit:
    kind: ModelVariant
    ids: array[int]
    text: TextPrompt | None

    @property
    def free_tokens(self) -> int:
        return self.kind.capabilities.max_seq_len - len(self.ids)


async def fit(
    service: Service, kinds: Sequence[ModelVariant], prompt: Prompt, options: Options, *, chat: bool
) -> FittedPrompt:
    """Tokenize the prompt, and select the variants in `kinds` that can process it.

    All selected variants must get the same token ids from the prompt. The first variant that fits
    determines the ids, and variants with other ids are not selected. Variants that take token ids
    are tried first, because they get the exact prompt.

    If the client sets `max_tokens`, only variants that can generate so many tokens are selected. If
    no ready variant can, `max_tokens` is reduced to the highest number that a ready variant can
    generate.

    Raise the error of the first variant if all variants refuse the prompt.
    """
    encode: Encode = partial(service.prompts.encode, tenant=options.caller.tenant)
    if len(kinds) > 1:
        encode = _memoize_encode(encode)
    refusals = VariantRefusals()
    fits: list[_VariantFit] = []
    for kind in _sort_by_preference(kinds):
        try:
            found = await _fit(service, kind, prompt, options, encode, chat=chat)
        except InvalidRequest as error:
            refusals.note(error)
            continue
        if not fits or found.ids == fits[0].ids:
            fits.append(found)
    if not fits:
        refusals.raise_first()
    ids, limit = fits[0].ids, options.max_tokens
    if limit is not None and len(fits) > 1:
        served = [each for each in fits if service.replicas.is_served((each.kind,))] or fits
        most = min(limit, max(each.free_tokens for each in served))
        fits = [each for each in fits if each.free_tokens >= most]
    free_tokens = min([each.free_tokens for each in fits])
    echo = None
    if options.echo:
        as_given = isinstance(prompt, str) and options.truncate_prompt is None
        echo = (
            str(prompt)
            if as_given
            else await service.prompts.decode_offloaded(ids, tenant=options.caller.tenant)
        )
    return FittedPrompt(
        ids,
        free_tokens if limit is None else min(limit, free_tokens),
        echo,
        _forms(fits),
    )


def _forms(fits: Sequence[_VariantFit]) -> Mapping[object, TextPrompt | None]:
    forms: dict[object, TextPrompt | None] = {each.kind: each.text for each in fits}
    return forms if any(forms.values()) else _as_ids(tuple(forms))


@lru_cache(maxsize=64)
def _as_ids(kinds: tuple[object, ...]) -> Mapping[object, TextPrompt | None]:
    """Return `FittedPrompt.forms` for variants that all take token ids.

    The cache makes requests with the same variants share one mapping, which saves 200 bytes per
    open stream.
    """
    return dict.fromkeys(kinds)


def _sort_by_preference(kinds: Sequence[ModelVariant]) -> Sequence[ModelVariant]:
    """Return the variants, sorted by preference.

    Variants that take token ids come before variants that take text. Among each of the two kinds,
    variants that allow longer prompts come first.
    """
    if len(kinds) == 1:
        return kinds
    return sorted(
        kinds,
        key=lambda kind: (kind.capabilities.text is not None, -longest_prompt(kind.capabilities)),
    )


def _memoize_encode(encode: Encode) -> Encode:
    """Return a version of `encode` with a cache, because most variants encode the same text."""
    known: dict[tuple[str | GuardedText, bool], array[int]] = {}

    async def encode_once(text: str | GuardedText, *, add_special_tokens: bool) -> array[int]:
        ids = known.get((text, add_special_tokens))
        if ids is None:
            ids = await encode(text, add_special_tokens=add_special_tokens)
            known[text, add_special_tokens] = ids
        return ids

    return encode_once


async def _fit(
    service: Service,
    kind: ModelVariant,
    prompt: Prompt,
    options: Options,
    encode: Encode,
    *,
    chat: bool,
) -> _VariantFit:
    capabilities = kind.capabilities
    model = capabilities.text
    sent: str = ""
    given: PromptInput
    if options.truncate_prompt == MODEL_MAXIMUM:
        options = replace(options, truncate_prompt=_max_prompt_tokens(capabilities, options))
    truncate = options.truncate_prompt
    if not isinstance(prompt, list):
        given = prompt
        # A text that cannot fit is refused before it is tokenized.
        if truncate is None or truncate > longest_prompt(capabilities):
            check_text(service.prompts, capabilities, str(prompt), param=_param(chat=chat))
        elif isinstance(prompt, str):
            given = service.prompts.truncate_text(prompt, truncate, options.truncation_side)
    else:
        truncated = prompt if truncate is None else _truncate(prompt, truncate, options)
        # Check the length before any other work: decoding a million ids would block the event loop
        # for a second.
        _check_length(capabilities, truncated, chat=chat)
        read = partial(_read_ids, service, truncated, _param(chat=chat))
        given = await service.prompts.threads.run(options.caller.tenant, len(truncated), read)
    if model is not None:
        sent, given = await _as_text(
            *(service, capabilities.model, given, model, options, encode), chat=chat
        )
    ids = await _prompt_ids(given, options, encode, chat=chat)
    _check_length(capabilities, ids, chat=chat)
    _check_logits(service, capabilities, ids, options)
    text = None
    if model is not None:
        restates = capabilities.restates_prompt
        text = await text_prompt(service.prompts, sent, ids, model, options, restates=restates)
    return _VariantFit(kind, ids, text)


async def _as_text(
    service: Service,
    name: str,
    prompt: PromptInput,
    model: TextModel,
    options: Options,
    encode: Encode,
    *,
    chat: bool,
) -> tuple[str, array[int]]:
    """Return the text to send for a prompt, and the token ids that the model makes of this text.

    Raises:
        UnsupportedParameter: the prompt consists of token ids, and no known text is tokenized to
            these ids. Also raised if the prompt is a GuardedText: a chat in which the client has
            written control tokens as text. The model would read this text as real control tokens.
    """
    if isinstance(prompt, array):
        tenant = options.caller.tenant
        text = await text_of_ids(service.prompts, prompt, model, encode, tenant=tenant)
        if text is None:
            raise UnsupportedParameter(
                f"prompt: these token ids are not served through the model {name!r}, which takes "
                "text: no text is known to be tokenized to them.",
                param="prompt",
            )
        return text, prompt
    if isinstance(prompt, GuardedText):
        raise UnsupportedParameter(
            f"messages: control tokens are not served through the model {name!r}, which would take "
            "them for more than text.",
            param="messages",
        )
    return await fit_text(service.prompts, prompt, model, encode, chat=chat)


async def _prompt_ids(
    prompt: PromptInput,
    options: Options,
    encode: Encode,
    *,
    chat: bool,
) -> array[int]:
    """Return the token ids of a prompt, truncated as the options require.

    Raise InvalidRequest if no ids are left.
    """
    ids = prompt
    if not isinstance(ids, array):
        # Add no special tokens to a chat: the chat template has added them.
        ids = await encode(ids, add_special_tokens=not chat)
    if options.truncate_prompt is not None:
        ids = _truncate(ids, options.truncate_prompt, options)
    if not ids:
        param = _param(chat=chat)
        raise InvalidRequest(f"{param}: must have at least one token.", param=param)
    return ids


def _max_prompt_tokens(capabilities: ModelCapabilities, options: Options) -> int:
    """Return the maximum length of the prompt in tokens if `max_tokens` tokens must be generated.

    The result is at least 1.
    """
    available = capabilities.max_seq_len - (options.max_tokens or 1)
    return max(1, min(longest_prompt(capabilities), available))


def _truncate(ids: Ids, most: int, options: Options) -> Ids:
    return ids[:most] if options.truncation_side == "right" else ids[-most:]


def _read_ids(service: Service, ids: list[int], param: str) -> array[int]:
    """Return the token ids as an int32 array. This takes 40 ns per id.

    Raise InvalidRequest for ids outside the vocabulary.
    """
    if max(ids, default=0) >= service.prompts.vocab_size:
        allowed = service.prompts.vocab_size - 1
        raise InvalidRequest(f"{param}: token ids must be 0 to {allowed}.", param=param)
    return array("i", ids)


def longest_prompt(capabilities: ModelCapabilities) -> int:
    """Return the maximum prompt length in tokens. At least one token can then be generated."""
    limit = capabilities.max_seq_len - 1
    if capabilities.max_input_len is not None:
        limit = min(limit, capabilities.max_input_len)
    return limit


def check_text(prompts: Prompts, capabilities: ModelCapabilities, text: str, *, param: str) -> None:
    """Raise ContextLengthExceeded if the text has so many characters that it must be too long.

    This check is cheap because it does not tokenize the text.
    """
    if prompts.exceeds(text, longest_prompt(capabilities)):
        raise _too_long(capabilities, f"{len(text)} characters, too many for them", param)


def _check_length(capabilities: ModelCapabilities, ids: Sequence[int], *, chat: bool) -> None:
    """Raise ContextLengthExceeded if the prompt is longer than `longest_prompt` allows."""
    if len(ids) > longest_prompt(capabilities):
        raise _too_long(capabilities, str(len(ids)), _param(chat=chat))


def prompt_logprobs(options: Options, choice: int) -> int | None:
    """Return how many alternatives the engine must report for each prompt token.

    `choice` is the index of the choice among the choices of the prompt. Return None if the choice
    needs no log probabilities of prompt tokens. With `echo` and `logprobs`, every choice reports
    log probabilities of the prompt. With `prompt_logprobs`, the response reports them once, so only
    the first choice needs them.
    """
    found = []
    if options.echo and options.params.logprobs is not None:
        found.append(options.params.logprobs)
    if options.prompt_logprobs is not None and choice == 0:
        found.append(options.prompt_logprobs)
    return max(found, default=None)


def _check_logits(
    service: Service, capabilities: ModelCapabilities, ids: Sequence[int], options: Options
) -> None:
    """Raise InvalidRequest if log probabilities of the prompt need too many bytes of logits."""
    if prompt_logprobs(options, 0) is None:
        return
    param = "echo" if options.prompt_logprobs is None else "prompt_logprobs"
    of_token = capabilities.vocab_size * capabilities.logit_bytes
    limit = service.settings.max_prompt_logits_bytes
    if len(ids) * of_token > limit:
        raise InvalidRequest(
            f"{param}: the logits of {len(ids)} prompt tokens are {len(ids) * of_token} bytes; "
            f"allowed with logprobs: {limit}, of {limit // of_token} tokens.",
            param=param,
        )


def _too_long(capabilities: ModelCapabilities, found: str, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        # Do not change these words, because some client libraries recognize the error by them.
        f"This model's maximum context length is {capabilities.max_seq_len} tokens. Input tokens "
        f"exceed the configured limit of {longest_prompt(capabilities)} tokens; your prompt has "
        f"{found}.",
        param=param,
    )


def _param(*, chat: bool) -> str:
    return "messages" if chat else "prompt"
