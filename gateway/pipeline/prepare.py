"""From validated options and prompts to generations that may run."""

from __future__ import annotations

import asyncio
import math
import secrets
from dataclasses import dataclass
from functools import partial

from gateway.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from gateway.generation import MAX_CHOICES, Batch, Generation, Options, TextPrompt
from gateway.pipeline.capabilities import check_supported
from gateway.pipeline.text_prompt import fit_text, text_prompt
from gateway.service import Service
from gateway.triton.model_capabilities import ModelCapabilities, TextModel

_MAX_SEED = 2**63 - 1

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class _FittedPrompt:
    """One prompt within the engine's limits, and what it leaves to each of its choices."""

    ids: list[int]
    max_tokens: int
    echo: str | None
    text: TextPrompt | None


async def prepare(
    service: Service, prompts: list[str] | list[list[int]], options: Options, *, chat: bool
) -> Batch:
    """Tokenizes and fits a request into the engine's limits; each prompt gets `options.n` choices.

    Raises UnsupportedParameter for what the served model cannot do, ContextLengthExceeded when a
    prompt leaves no room for a single token, and InvalidRequest for too many choices and for a
    token id that is not in the vocabulary.
    """
    came = asyncio.get_running_loop().time()
    _check_choices(prompts, options)
    _check_ids(service, options)
    capabilities = service.replicas.capabilities
    check_supported(capabilities, options, chat=chat)
    fitted = [await _fit(service, capabilities, each, options, chat=chat) for each in prompts]
    # The engine knows a request by this id, so it must be unique whatever the client sends.
    request_id = secrets.token_hex(16)
    timeout_s = min(options.caller.timeout_s or math.inf, service.settings.request_timeout)
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
        bad_ids=service.prompts.word_ids(options.bad_words),
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
            text=prompt.text,
        )
        for index, prompt in enumerate(prompts)
        for choice in range(each)
    ]


def _check_choices(prompts: list[str] | list[list[int]], options: Options) -> None:
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
            raise InvalidRequest(f"{param}: token ids must be 0 to {size - 1}.", param=param)


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
    if model is not None:
        sent, given = await _as_text(service, capabilities.model, prompt, model, chat=chat)
    ids = await _prompt_ids(service, given, options.truncate_prompt, chat=chat)
    _check_length(capabilities, ids, chat=chat)
    room = capabilities.max_seq_len - len(ids)
    text = None
    if model is not None:
        text = text_prompt(service.prompts, sent, ids, model, options)
    echo = None
    if options.echo:
        as_given = isinstance(prompt, str) and options.truncate_prompt is None
        echo = str(prompt) if as_given else service.prompts.decode(ids)
    limit = room if options.max_tokens is None else min(options.max_tokens, room)
    return _FittedPrompt(ids, limit, echo, text)


async def _as_text(
    service: Service, name: str, prompt: Prompt, model: TextModel, *, chat: bool
) -> tuple[str, list[int]]:
    """The text to send for a prompt and the ids that it is. Raises UnsupportedParameter for ids."""
    if isinstance(prompt, list):
        raise UnsupportedParameter(
            f"prompt: token ids are not served through the model {name!r}, which takes text.",
            param="prompt",
        )
    return await fit_text(service.prompts, prompt, model, chat=chat)


async def _prompt_ids(
    service: Service, prompt: Prompt, truncate: int | None, *, chat: bool
) -> list[int]:
    """Token ids of a prompt, at most its last `truncate`."""
    param = _param(chat=chat)
    if isinstance(prompt, str):
        # A chat template writes its own special tokens.
        ids = await service.prompts.encode(prompt, add_special_tokens=not chat)
    else:
        ids = prompt
        if max(prompt, default=0) >= service.prompts.vocab_size:
            allowed = service.prompts.vocab_size - 1
            raise InvalidRequest(f"{param}: token ids must be 0 to {allowed}.", param=param)
    if truncate is not None:
        ids = ids[-truncate:]
    if not ids:
        raise InvalidRequest(f"{param}: must have at least one token.", param=param)
    return ids


def _check_length(capabilities: ModelCapabilities, ids: list[int], *, chat: bool) -> None:
    """Raises ContextLengthExceeded when there is no room for a token of the answer."""
    limit = capabilities.max_seq_len - 1
    if capabilities.max_input_len is not None:
        limit = min(limit, capabilities.max_input_len)
    if len(ids) > limit:
        raise ContextLengthExceeded(
            # In these words client libraries recognise the case, besides by the code.
            f"This model's maximum context length is {capabilities.max_seq_len} tokens. Input "
            f"tokens exceed the configured limit of {limit} tokens; your prompt has {len(ids)}.",
            param=_param(chat=chat),
        )


def _param(*, chat: bool) -> str:
    return "messages" if chat else "prompt"
