"""The order of things for one request, in one readable place."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from gateway.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    RequestTimeout,
    UnsupportedParameter,
)
from gateway.generation import (
    MAX_CHOICES,
    Batch,
    ChoiceDelta,
    FinishReason,
    Generation,
    Options,
    TextDelta,
    TokenLogprob,
)
from gateway.service import Service
from gateway.text import TextStream, text_offsets

_MAX_SEED = 2**63 - 1


async def prepare(
    service: Service, prompts: list[str] | list[list[int]], options: Options, *, chat: bool
) -> Batch:
    """Tokenizes and fits a request into the engine's limits; each prompt gets `options.n` choices.

    Raises ContextLengthExceeded when a prompt leaves no room for a single token, and
    InvalidRequest for a token id that is not in the vocabulary.
    """
    if len(prompts) * options.n > MAX_CHOICES:
        found = len(prompts) * options.n
        raise InvalidRequest(
            f"prompt: {found} choices asked for; allowed: {MAX_CHOICES} in one request.",
            param="prompt",
        )
    _check_ids(service, options)
    # The engine knows a request by this id, so it must be unique whatever the client sends.
    request_id = uuid.uuid4().hex
    if options.guide is not None and not service.engine.dialect.guided:
        raise UnsupportedParameter(
            "Guided decoding is not set up in this engine, so response_format, structured_outputs "
            "and a required tool cannot be enforced.",
            param=options.guide_param,
        )
    dialect = service.engine.dialect
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
    common = Generation(
        request_id=request_id,
        prompt_ids=[],
        max_tokens=0,
        sampling=options.sampling,
        stop=options.stop,
        stop_ids=service.prompts.stop_ids(options),
        include_stop=options.include_stop,
        skip_special_tokens=options.skip_special_tokens,
        end_id=service.prompts.end_id(ignore_eos=options.ignore_eos),
        usage=options.usage,
        logprobs=options.logprobs,
        bad_ids=service.prompts.word_ids(options.bad_words),
        beams=options.n if options.beam_search else 0,
        length_penalty=options.length_penalty,
        lora=options.lora,
        message=options.message,
        guide=options.guide,
    )
    seed = options.sampling.seed
    generations: list[Generation] = []
    prompt_tokens = 0
    for prompt in prompts:
        prompt_ids, room = await _fit(service, prompt, options.truncate_prompt, chat=chat)
        prompt_tokens += len(prompt_ids)
        limit = room if options.max_tokens is None else min(options.max_tokens, room)
        echo = None
        if options.echo:
            whole = isinstance(prompt, str) and options.truncate_prompt is None
            echo = str(prompt) if whole else service.prompts.decode(prompt_ids)
        # The beams of one search are one engine request.
        for choice in range(1 if options.beam_search else options.n):
            generations.append(
                replace(
                    common,
                    request_id=f"{request_id}-{len(generations)}",
                    prompt_ids=prompt_ids,
                    max_tokens=limit,
                    echo=echo,
                    sampling=replace(options.sampling, seed=(seed + choice) & _MAX_SEED),
                )
            )
    return Batch(
        request_id,
        generations,
        len(prompts),
        len(prompts) * options.n,
        prompt_tokens,
        dialect.fingerprint,
        dialect.tokens_per_block,
    )


def _check_ids(service: Service, options: Options) -> None:
    """Raises InvalidRequest for a token id that is not in the vocabulary."""
    size = service.prompts.vocab_size
    for param, ids in (
        ("logit_bias", [token_id for token_id, _ in options.sampling.logit_bias]),
        ("stop_token_ids", options.stop_token_ids),
    ):
        if max(ids, default=0) >= size:
            raise InvalidRequest(f"{param}: token ids must be 0 to {size - 1}.", param=param)


async def _fit(
    service: Service, prompt: str | list[int], truncate: int | None, *, chat: bool
) -> tuple[list[int], int]:
    """Token ids of a prompt, at most its last `truncate`, and what the context leaves for more."""
    dialect = service.engine.dialect
    param = "messages" if chat else "prompt"
    if isinstance(prompt, str):
        # A chat template writes its own special tokens.
        prompt_ids = await service.prompts.encode(prompt, add_special_tokens=not chat)
    else:
        prompt_ids = prompt
        if max(prompt, default=0) >= service.prompts.vocab_size:
            allowed = service.prompts.vocab_size - 1
            raise InvalidRequest(f"{param}: token ids must be 0 to {allowed}.", param=param)
    if truncate is not None:
        prompt_ids = prompt_ids[-truncate:]
    if not prompt_ids:
        raise InvalidRequest(f"{param}: must have at least one token.", param=param)
    limit = dialect.max_seq_len - 1
    if dialect.max_input_len is not None:
        limit = min(limit, dialect.max_input_len)
    if len(prompt_ids) > limit:
        raise ContextLengthExceeded(
            # In these words client libraries recognise the case, besides by the code.
            f"This model's maximum context length is {dialect.max_seq_len} tokens. Input tokens "
            f"exceed the configured limit of {limit} tokens; your prompt has {len(prompt_ids)}.",
            param=param,
        )
    return prompt_ids, dialect.max_seq_len - len(prompt_ids)


async def _echo(service: Service, generation: Generation) -> TextDelta:
    """The prompt as the first delta; the last one too when nothing is to be generated."""
    logprobs: list[TokenLogprob] = []
    if generation.logprobs is not None:
        timeout_s = service.settings.request_timeout
        entries = await service.engine.prompt_logprobs(generation, timeout_s)
        offsets = text_offsets(service.prompts.tokenizer, generation.prompt_ids)
        logprobs = [replace(e, text_offset=at) for e, at in zip(entries, offsets, strict=True)]
    finish: FinishReason | None = None if generation.max_tokens else "length"
    return TextDelta(generation.echo or "", 0, finish, logprobs=tuple(logprobs))


async def choices(service: Service, batch: Batch) -> AsyncGenerator[ChoiceDelta, None]:
    """Deltas of all choices as they come; the first error ends all. Consume under `aclosing`."""
    if batch.generations[0].beams:
        for start, generation in enumerate(batch.generations):
            for index, delta in enumerate(await _beams(service, generation)):
                yield start * generation.beams + index, delta
        return
    if len(batch.generations) == 1:
        async with aclosing(generate(service, batch.generations[0])) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    # Only here do tokens pass a queue: one task for each choice.
    queue: asyncio.Queue[ChoiceDelta | BaseException] = asyncio.Queue(len(batch.generations))

    async def run(index: int, generation: Generation) -> None:
        try:
            async with aclosing(generate(service, generation)) as deltas:
                async for delta in deltas:
                    await queue.put((index, delta))
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(run(i, g)) for i, g in enumerate(batch.generations)]
    unfinished = len(tasks)
    try:
        while unfinished:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            unfinished -= item[1].finish is not None
            yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _beams(service: Service, generation: Generation) -> list[TextDelta]:
    """The beams of one search, each as its only delta; the engine cannot stream them apart."""
    metrics = service.metrics
    metrics.in_flight.inc()
    try:
        with service.engine.generate(generation, service.settings.request_timeout) as tokens:
            deltas = await tokens.beams()
    except TimeoutError:
        limit = service.settings.request_timeout
        raise RequestTimeout(f"The request took longer than {limit:g} seconds.") from None
    finally:
        metrics.in_flight.dec()
    model = generation.lora.name if generation.lora else service.settings.model_name
    metrics.prompt_tokens.labels(model).inc(len(generation.prompt_ids))
    texts = [TextStream(service.prompts.tokenizer, generation).push(delta) for delta in deltas]
    metrics.completion_tokens.labels(model).inc(sum(text.tokens for text in texts))
    return texts


async def generate(service: Service, generation: Generation) -> AsyncGenerator[TextDelta, None]:
    """Text deltas of one generation; the last one carries the finish reason.

    Leaving early (the client went away, a stop string, the deadline) stops the engine. Consume
    it under `contextlib.aclosing`, from one task.
    """
    metrics = service.metrics
    model = generation.lora.name if generation.lora else service.settings.model_name
    text = TextStream(service.prompts.tokenizer, generation)
    started = time.perf_counter()
    tokens_seen = 0
    metrics.in_flight.inc()
    metrics.prompt_tokens.labels(model).inc(len(generation.prompt_ids))
    try:
        if generation.echo is not None:
            yield await _echo(service, generation)
            if not generation.max_tokens:
                return
        with service.engine.generate(generation, service.settings.request_timeout) as tokens:
            async for token_delta in tokens:
                if not tokens_seen and token_delta.ids:
                    first = time.perf_counter() - started
                    metrics.time_to_first_token.labels(model).observe(first)
                delta = text.push(token_delta)
                tokens_seen = delta.tokens
                yield delta
                if delta.finish is not None:
                    return
    except TimeoutError:
        limit = service.settings.request_timeout
        raise RequestTimeout(f"The request took longer than {limit:g} seconds.") from None
    finally:
        metrics.in_flight.dec()
        metrics.completion_tokens.labels(model).inc(tokens_seen)
        metrics.duration.labels(model).observe(time.perf_counter() - started)
