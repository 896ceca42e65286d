"""Preparation of one prompt for several model variants, each with its limits and prompt form."""

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
        echo: the text of the prompt if the answer must begin with it; otherwise None.
        forms: by each variant that can take the prompt, the text to send; None to send `ids`.
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
    """Return the prompt for all variants in `kinds` that can take it with the same token ids.

    If variants would make different ids of the prompt, those of a variant that takes ids are
    chosen, since such a variant loses nothing of the prompt. If the client limits the length of the
    answer, only variants with enough free tokens remain: as many as the limit, or as the best ready
    variant has.

    Raises the first variant's error if all variants refuse the prompt.
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
    """Return the forms if no variant takes text.

    All requests share one mapping: a mapping for each would take 200 bytes per open stream.
    """
    return dict.fromkeys(kinds)


def _sort_by_preference(kinds: Sequence[ModelVariant]) -> Sequence[ModelVariant]:
    """Return the variants that take ids first, then those that take the longest prompts."""
    if len(kinds) == 1:
        return kinds
    return sorted(
        kinds,
        key=lambda kind: (kind.capabilities.text is not None, -longest_prompt(kind.capabilities)),
    )


def _memoize_encode(encode: Encode) -> Encode:
    """Return a version of `encode` that caches ids, since most variants need the same text."""
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
        # Check the length first: finding the text of the ids takes a second of the event loop for a
        # million ids.
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
    """Return the text to send for a prompt, and the ids that the model makes of that text.

    Raises UnsupportedParameter if no text is known for the prompt's ids, and for a GuardedText:
    the model would encode parts of the client's text as control tokens.
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
    """Return the token ids of a prompt, truncated as `options` say.

    Raises InvalidRequest if no ids are left.
    """
    ids = prompt
    if not isinstance(ids, array):
        # Add no special tokens to a chat: the chat template has written them.
        ids = await encode(ids, add_special_tokens=not chat)
    if options.truncate_prompt is not None:
        ids = _truncate(ids, options.truncate_prompt, options)
    if not ids:
        param = _param(chat=chat)
        raise InvalidRequest(f"{param}: must have at least one token.", param=param)
    return ids


def _max_prompt_tokens(capabilities: ModelCapabilities, options: Options) -> int:
    """Return the maximum number of prompt tokens that leaves space for the answer; at least 1."""
    available = capabilities.max_seq_len - (options.max_tokens or 1)
    return max(1, min(longest_prompt(capabilities), available))


def _truncate(ids: Ids, most: int, options: Options) -> Ids:
    return ids[:most] if options.truncation_side == "right" else ids[-most:]


def _read_ids(service: Service, ids: list[int], param: str) -> array[int]:
    """Return the ids as an array, which takes 40 ns per id.

    Raises InvalidRequest for ids outside the vocabulary.
    """
    if max(ids, default=0) >= service.prompts.vocab_size:
        allowed = service.prompts.vocab_size - 1
        raise InvalidRequest(f"{param}: token ids must be 0 to {allowed}.", param=param)
    return array("i", ids)


def longest_prompt(capabilities: ModelCapabilities) -> int:
    """Return the maximum prompt length in tokens, which leaves one token for the answer."""
    limit = capabilities.max_seq_len - 1
    if capabilities.max_input_len is not None:
        limit = min(limit, capabilities.max_input_len)
    return limit


def check_text(prompts: Prompts, capabilities: ModelCapabilities, text: str, *, param: str) -> None:
    """Raise ContextLengthExceeded for a text so long that it must have too many tokens."""
    if prompts.exceeds(text, longest_prompt(capabilities)):
        raise _too_long(capabilities, f"{len(text)} characters, too many for them", param)


def _check_length(capabilities: ModelCapabilities, ids: Sequence[int], *, chat: bool) -> None:
    """Raise ContextLengthExceeded if no token is left for the answer."""
    if len(ids) > longest_prompt(capabilities):
        raise _too_long(capabilities, str(len(ids)), _param(chat=chat))


def prompt_logprobs(options: Options, choice: int) -> int | None:
    """Return the number of alternatives to request for each token of the prompt, for one choice.

    Return None if the choice needs no log probabilities of the prompt. With `echo`, each choice
    needs them; `prompt_logprobs` is reported once, so only the first choice needs them.
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
    """Raise InvalidRequest if the prompt's log probabilities need more logits than allowed."""
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
        # Do not change these words: some client libraries recognise the error by them.
        f"This model's maximum context length is {capabilities.max_seq_len} tokens. Input tokens "
        f"exceed the configured limit of {longest_prompt(capabilities)} tokens; your prompt has "
        f"{found}.",
        param=param,
    )


def _param(*, chat: bool) -> str:
    return "messages" if chat else "prompt"
