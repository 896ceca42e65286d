"""Conversion of validated options and prompts to a batch of engine requests.

See decision 023 in docs/decisions.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from functools import partial

from gateway.errors import ClientDeadline, EngineUnavailable, InvalidRequest, RequestTimeout
from gateway.generation.batch import Batch
from gateway.generation.engine_request import Generation
from gateway.generation.options import MAX_CHOICES, MAX_SEED, Options
from gateway.pipeline.capabilities import check_supported
from gateway.pipeline.fit import FittedPrompt, Prompt, fit, prompt_logprobs
from gateway.pipeline.refusals import VariantRefusals
from gateway.scheduling.kinds import ModelVariant
from gateway.service import Service
from gateway.tokenization.bad_words import bad_word_ids


async def prepare(
    service: Service, prompts: Sequence[Prompt], options: Options, *, chat: bool
) -> Batch:
    """Tokenize the prompts and check them against the engine's limits; return the batch to execute.

    The batch has `options.n` choices for each prompt.

    Raises:
        UnsupportedParameter: the served model does not support a parameter.
        ContextLengthExceeded: a prompt is so long that no token can be generated.
        InvalidRequest: too many choices, a token id outside the vocabulary, or an invalid guide
            (JSON schema, regular expression or grammar).
        Overloaded: too much text waits to be tokenized, or too many guides wait to be compiled.
        RequestTimeout, ClientDeadline: the request's time ended before its guide was compiled.
        EngineUnavailable: no replica that can run the request is ready.
    """
    came = asyncio.get_running_loop().time()
    _check_choices(prompts, options)
    _check_ids(service, options)
    kinds = service.replicas.variants
    timeout_s = options.caller.timeout_s or service.settings.request_timeout
    able, options = await _select_variants(service, kinds, options, timeout_s, chat=chat)
    fitted: list[FittedPrompt] = []
    for each in prompts:
        if fitted:
            # Let other tasks run between two prompts, because short prompts are tokenized on the
            # event loop.
            await asyncio.sleep(0)
        fitted.append(await fit(service, able, each, options, chat=chat))
    if len(kinds) > 1 and not all(service.replicas.is_served(each.forms) for each in fitted):
        raise EngineUnavailable("No inference server that can take this is ready; try again.")
    # Do not use an id that a client has sent: the engine needs unique ids, and several clients may
    # send the same id.
    request_id = secrets.token_hex(16)
    # Number of characters to tokenize. Each bad word is encoded twice: with and without a space.
    chars = sum(map(len, options.params.stop)) + 2 * sum(map(len, options.bad_words))
    make = partial(_build_generations, service, request_id, fitted, options)
    return Batch(
        request_id=request_id,
        generations=await service.prompts.threads.run(options.caller.tenant, chars, make),
        prompts=len(prompts),
        choices=len(prompts) * options.n,
        prompt_tokens=sum([len(prompt.ids) for prompt in fitted]),
        fingerprint=service.replicas.fingerprint,
        caller=options.caller,
        timeout_s=timeout_s,
        deadline=came + timeout_s,
        unenforced=options.unenforced,
    )


async def _select_variants(
    service: Service,
    kinds: Sequence[ModelVariant],
    options: Options,
    timeout_s: float,
    *,
    chat: bool,
) -> tuple[list[ModelVariant], Options]:
    """Return the model variants that support the request, and the options to use with them.

    A request may have a guide: a JSON schema, regular expression or grammar. The returned options
    have the guide in the format of the guided decoding backend that these variants use. Raise the
    error of the first variant if no variant supports the request.
    """
    refusals = VariantRefusals()
    able: list[ModelVariant] = []
    for kind in kinds:
        try:
            check_supported(kind.capabilities, options, chat=chat)
        except InvalidRequest as error:
            refusals.note(error)
        else:
            able.append(kind)
    if able and options.params.guide is not None:
        for backend in dict.fromkeys([kind.capabilities.guides for kind in able]):
            try:
                checked = options
                if backend is not None:
                    async with asyncio.timeout(timeout_s):
                        checked = await service.guides.check(options, backend)
            except TimeoutError:
                late = ClientDeadline if options.caller.timeout_s is not None else RequestTimeout
                raise late(timeout_s) from None
            except InvalidRequest as error:
                refusals.note(error)
            else:
                # Return only variants with the guided decoding backend `backend`, because other
                # backends may need the guide in another form.
                return [kind for kind in able if kind.capabilities.guides == backend], checked
        able = []
    if not able:
        refusals.raise_first()
    return able, options


def _build_generations(
    service: Service, request_id: str, prompts: list[FittedPrompt], options: Options
) -> list[Generation]:
    """Return the engine requests of all choices, prompt by prompt."""
    of_request = partial(
        Generation,
        params=options.params,
        stop_ids=service.prompts.stop_ids(options),
        later_end_ids=service.prompts.later_end_ids(options),
        bad_ids=bad_word_ids(service.prompts.tokenizer, options.bad_words),
        end_id=service.prompts.end_id(options),
        beams=options.n if options.beam_search else 0,
    )
    # Number of generations for each prompt. A beam search is a single generation.
    each = 1 if options.beam_search else options.n
    return [
        of_request(
            request_id=f"{request_id}-{index * each + choice}",
            prompt_ids=prompt.ids,
            max_tokens=prompt.max_tokens,
            seed=(options.seed + choice) & MAX_SEED,
            echo=prompt.echo,
            prompt_logprobs=prompt_logprobs(options, choice),
            text=next(iter(prompt.forms.values())),
            forms=prompt.forms,
        )
        for index, prompt in enumerate(prompts)
        for choice in range(each)
    ]


def _check_choices(prompts: Sequence[Prompt], options: Options) -> None:
    choices = len(prompts) * options.n
    if choices > MAX_CHOICES:
        raise InvalidRequest(
            f"prompt: {choices} choices asked for; allowed: {MAX_CHOICES} in one request.",
            param="prompt",
        )


def _check_ids(service: Service, options: Options) -> None:
    """Raise InvalidRequest for a token id that is not in the vocabulary."""
    size = service.prompts.vocab_size
    for param, ids in (
        ("logit_bias", [token_id for token_id, _ in options.params.logit_bias]),
        ("stop_token_ids", options.stop_token_ids),
    ):
        if max(ids, default=0) >= size:
            raise InvalidRequest(
                f"{param}: found {max(ids)}; allowed: token ids from 0 to {size - 1}.", param=param
            )
