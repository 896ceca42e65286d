"""From validated options and prompts to generations that may run."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from gateway.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from gateway.generation import MAX_CHOICES, Batch, Generation, Options, TextPrompt
from gateway.pipeline.capabilities import check_supported
from gateway.pipeline.text_prompt import fit_text, text_of_ids, text_prompt
from gateway.service import Service
from gateway.tokenization.bad_words import bad_word_ids
from gateway.tokenization.control_tokens import GuardedText
from gateway.tokenization.prompts import Prompts
from gateway.triton.model_capabilities import ModelCapabilities, TextModel

_MAX_SEED = 2**63 - 1

Prompt = str | GuardedText | list[int]


@dataclass(frozen=True, slots=True)
class _FittedPrompt:
    """One prompt within the engine's limits, and what it leaves to each of its choices."""

    ids: list[int]
    max_tokens: int
    echo: str | None
    text: TextPrompt | None


async def prepare(
    service: Service, prompts: Sequence[Prompt], options: Options, *, chat: bool
) -> Batch:
    """Tokenizes and fits a request into the engine's limits; each prompt gets `options.n` choices.

    Raises UnsupportedParameter for what the served model cannot do, ContextLengthExceeded when a
    prompt leaves no room for a single token, InvalidRequest for too many choices, for a token id
    that is not in the vocabulary and for a guide that is none, and Overloaded when too much text
    waits.
    """
    came = asyncio.get_running_loop().time()
    _check_choices(prompts, options)
    _check_ids(service, options)
    capabilities = service.replicas.capabilities
    check_supported(capabilities, options, chat=chat)
    if capabilities.guides is not None:
        options = await service.guides.checked(options, capabilities.guides)
    fitted = [await _fit(service, capabilities, each, options, chat=chat) for each in prompts]
    # The engine knows a request by this id, so it must be unique whatever the client sends.
    request_id = secrets.token_hex(16)
    timeout_s = options.caller.timeout_s or service.settings.request_timeout
    return Batch(
        request_id=request_id,
        generations=_generations(service, request_id, fitted, options),
        prompts=len(prompts),
        choices=len(prompts) * options.n,
        prompt_tokens=sum([len(prompt.ids) for prompt in fitted]),
        fingerprint=capabilities.fingerprint,
        tokens_per_block=capabilities.tokens_per_block,
        caller=options.caller,
        timeout_s=timeout_s,
        deadline=came + timeout_s,
    )


def _generations(
    service: Service, request_id: str, prompts: list[_FittedPrompt], options: Options
) -> list[Generation]:
    """The engine requests of all choices, prompt by prompt."""
    of_request = partial(
        Generation,
        params=options.params,
        stop_ids=service.prompts.stop_ids(options),
        bad_ids=bad_word_ids(service.prompts.tokenizer, options.bad_words),
        end_id=service.prompts.end_id(ignore_eos=options.ignore_eos),
        beams=options.n if options.beam_search else 0,
    )
    # The beams of one search are one engine request.
    each = 1 if options.beam_search else options.n
    return [
        of_request(
            request_id=f"{request_id}-{index * each + choice}",
            prompt_ids=prompt.ids,
            max_tokens=prompt.max_tokens,
            seed=(options.seed + choice) & _MAX_SEED,
            echo=prompt.echo,
            prompt_logprobs=_prompt_logprobs(options, choice),
            text=prompt.text,
        )
        for index, prompt in enumerate(prompts)
        for choice in range(each)
    ]


def _prompt_logprobs(options: Options, choice: int) -> int | None:
    """What a choice asks of its prompt: an echo is each choice's own, all else the first one's."""
    found = []
    if options.echo and options.params.logprobs is not None:
        found.append(options.params.logprobs)
    if options.prompt_logprobs is not None and choice == 0:
        found.append(options.prompt_logprobs)
    return max(found, default=None)


def _check_choices(prompts: Sequence[Prompt], options: Options) -> None:
    choices = len(prompts) * options.n
    if choices > MAX_CHOICES:
        raise InvalidRequest(
            f"prompt: {choices} choices asked for; allowed: {MAX_CHOICES} in one request.",
            param="prompt",
        )


def _check_ids(service: Service, options: Options) -> None:
    """Raises InvalidRequest for a token id that is not in the vocabulary."""
    size = service.prompts.vocab_size
    for param, ids in (
        ("logit_bias", [token_id for token_id, _ in options.params.sampling.logit_bias]),
        ("stop_token_ids", options.stop_token_ids),
    ):
        if max(ids, default=0) >= size:
            raise InvalidRequest(
                f"{param}: found {max(ids)}; allowed: token ids from 0 to {size - 1}.", param=param
            )


async def _fit(
    service: Service,
    capabilities: ModelCapabilities,
    prompt: Prompt,
    options: Options,
    *,
    chat: bool,
) -> _FittedPrompt:
    model = capabilities.text
    sent, given = "", prompt
    truncate = options.truncate_prompt
    if not isinstance(prompt, list):
        # What cannot fit is not tokenized first.
        if truncate is None or truncate > longest_prompt(capabilities):
            check_text(service.prompts, capabilities, str(prompt), param=_param(chat=chat))
        elif isinstance(prompt, str):
            given = service.prompts.part_of(prompt, truncate, options.truncation_side)
    elif truncate is None:
        # Nor is there a text looked for: that takes a second of everybody's for a million ids.
        _check_length(capabilities, prompt, chat=chat)
    if model is not None:
        sent, given = await _as_text(service, capabilities.model, prompt, model, options, chat=chat)
    ids = await _prompt_ids(service, given, options, chat=chat)
    _check_length(capabilities, ids, chat=chat)
    _check_logits(service, capabilities, ids, options)
    room = capabilities.max_seq_len - len(ids)
    text = None
    if model is not None:
        restates = capabilities.restates_prompt
        text = await text_prompt(service.prompts, sent, ids, model, options, restates=restates)
    echo = None
    if options.echo:
        as_given = isinstance(prompt, str) and options.truncate_prompt is None
        echo = str(prompt) if as_given else service.prompts.decode(ids)
    limit = room if options.max_tokens is None else min(options.max_tokens, room)
    return _FittedPrompt(ids, limit, echo, text)


async def _as_text(
    service: Service,
    name: str,
    prompt: Prompt,
    model: TextModel,
    options: Options,
    *,
    chat: bool,
) -> tuple[str, list[int]]:
    """The text to send for a prompt and the ids that it is.

    Raises UnsupportedParameter for ids that no text is tokenized to, and for text that the model
    would take for control tokens, InvalidRequest for ids that are not in the vocabulary.
    """
    tenant = options.caller.tenant
    if isinstance(prompt, list):
        _check_vocabulary(service, prompt, _param(chat=chat))
        text = await text_of_ids(service.prompts, prompt, model, tenant=tenant)
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
    return await fit_text(service.prompts, prompt, model, chat=chat, tenant=tenant)


async def _prompt_ids(
    service: Service, prompt: Prompt, options: Options, *, chat: bool
) -> list[int]:
    """Token ids of a prompt, no more than `options` leave of it."""
    param = _param(chat=chat)
    if not isinstance(prompt, list):
        # A chat template writes its own special tokens.
        ids = await service.prompts.encode(
            prompt, add_special_tokens=not chat, tenant=options.caller.tenant
        )
    else:
        ids = prompt
        _check_vocabulary(service, prompt, param)
    if options.truncate_prompt is not None:
        keep = options.truncate_prompt
        ids = ids[:keep] if options.truncation_side == "right" else ids[-keep:]
    if not ids:
        raise InvalidRequest(f"{param}: must have at least one token.", param=param)
    return ids


def _check_vocabulary(service: Service, ids: list[int], param: str) -> None:
    """Raises InvalidRequest for token ids that there are not."""
    if max(ids, default=0) >= service.prompts.vocab_size:
        allowed = service.prompts.vocab_size - 1
        raise InvalidRequest(f"{param}: token ids must be 0 to {allowed}.", param=param)


def longest_prompt(capabilities: ModelCapabilities) -> int:
    """In tokens: it leaves room for one of the answer."""
    limit = capabilities.max_seq_len - 1
    if capabilities.max_input_len is not None:
        limit = min(limit, capabilities.max_input_len)
    return limit


def check_text(prompts: Prompts, capabilities: ModelCapabilities, text: str, *, param: str) -> None:
    """Raises ContextLengthExceeded for a text that cannot fit, whatever its tokens are."""
    if prompts.exceeds(text, longest_prompt(capabilities)):
        raise _too_long(capabilities, f"{len(text)} characters, too many for them", param)


def _check_length(capabilities: ModelCapabilities, ids: list[int], *, chat: bool) -> None:
    """Raises ContextLengthExceeded when there is no room for a token of the answer."""
    if len(ids) > longest_prompt(capabilities):
        raise _too_long(capabilities, str(len(ids)), _param(chat=chat))


def _check_logits(
    service: Service, capabilities: ModelCapabilities, ids: list[int], options: Options
) -> None:
    """Raises InvalidRequest for a prompt whose log probabilities need more logits than allowed."""
    if _prompt_logprobs(options, 0) is None:
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
        # In these words client libraries recognise the case, besides by the code.
        f"This model's maximum context length is {capabilities.max_seq_len} tokens. Input tokens "
        f"exceed the configured limit of {longest_prompt(capabilities)} tokens; your prompt has "
        f"{found}.",
        param=param,
    )


def _param(*, chat: bool) -> str:
    return "messages" if chat else "prompt"
