"""The order of things for one request, in one readable place."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from dataclasses import replace
from functools import partial

from gateway.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    RequestTimeout,
    UnsupportedParameter,
)
from gateway.generation import (
    MAX_CHOICES,
    Batch,
    FinishReason,
    Generation,
    Options,
    Sink,
    TextDelta,
    TokenDelta,
    TokenLogprob,
)
from gateway.observability.request_context import RequestContext
from gateway.pipeline.capabilities import check_supported
from gateway.pipeline.text_prompt import fit_text, text_prompt
from gateway.scheduling.attempts import attempt
from gateway.scheduling.replicas import ReplicaLease
from gateway.service import Service
from gateway.tokenization.piece_stream import PieceStream
from gateway.tokenization.text_stream import TextStream
from gateway.triton.model_capabilities import TextModel

_MAX_SEED = 2**63 - 1


async def prepare(
    service: Service, prompts: list[str] | list[list[int]], options: Options, *, chat: bool
) -> Batch:
    """Tokenizes and fits a request into the engine's limits; each prompt gets `options.n` choices.

    Raises ContextLengthExceeded when a prompt leaves no room for a single token, and
    InvalidRequest for a token id that is not in the vocabulary.
    """
    started = asyncio.get_running_loop().time()
    if len(prompts) * options.n > MAX_CHOICES:
        found = len(prompts) * options.n
        raise InvalidRequest(
            f"prompt: {found} choices asked for; allowed: {MAX_CHOICES} in one request.",
            param="prompt",
        )
    _check_ids(service, options)
    # The engine knows a request by this id, so it must be unique whatever the client sends.
    request_id = secrets.token_hex(16)
    capabilities = service.replicas.capabilities
    check_supported(capabilities, options, chat=chat)
    # Building a Generation whole takes a third of the time of `dataclasses.replace`.
    generation_of = partial(
        Generation,
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
        sent, fitted = "", prompt
        if capabilities.text is not None:
            sent, fitted = await _as_text(service, prompt, capabilities.text, chat=chat)
        prompt_ids, room = await _fit(service, fitted, options.truncate_prompt, chat=chat)
        text = None
        if capabilities.text is not None:
            text = text_prompt(service.prompts, sent, prompt_ids, capabilities.text, options)
        prompt_tokens += len(prompt_ids)
        limit = room if options.max_tokens is None else min(options.max_tokens, room)
        echo = None
        if options.echo:
            as_given = isinstance(prompt, str) and options.truncate_prompt is None
            echo = str(prompt) if as_given else service.prompts.decode(prompt_ids)
        # The beams of one search are one engine request.
        for choice in range(1 if options.beam_search else options.n):
            generations.append(
                generation_of(
                    request_id=f"{request_id}-{len(generations)}",
                    prompt_ids=prompt_ids,
                    max_tokens=limit,
                    echo=echo,
                    text=text,
                    sampling=options.sampling
                    if not choice
                    else replace(options.sampling, seed=(seed + choice) & _MAX_SEED),
                )
            )
    timeout_s = min(options.timeout_s or math.inf, service.settings.request_timeout)
    return Batch(
        request_id,
        generations,
        len(prompts),
        len(prompts) * options.n,
        prompt_tokens,
        capabilities.fingerprint,
        capabilities.tokens_per_block,
        options.tenant,
        options.priority,
        timeout_s,
        started + timeout_s,
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


async def _as_text(
    service: Service, prompt: str | list[int], model: TextModel, *, chat: bool
) -> tuple[str, list[int]]:
    """The text to send for a prompt and the ids that it is. Raises UnsupportedParameter for ids."""
    if isinstance(prompt, list):
        raise UnsupportedParameter(
            f"prompt: token ids are not served through the model "
            f"{service.replicas.capabilities.model!r}, which takes text.",
            param="prompt",
        )
    return await fit_text(service.prompts, prompt, model, chat=chat)


async def _fit(
    service: Service, prompt: str | list[int], truncate: int | None, *, chat: bool
) -> tuple[list[int], int]:
    """Token ids of a prompt, at most its last `truncate`, and what the context leaves for more."""
    capabilities = service.replicas.capabilities
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
    limit = capabilities.max_seq_len - 1
    if capabilities.max_input_len is not None:
        limit = min(limit, capabilities.max_input_len)
    if len(prompt_ids) > limit:
        raise ContextLengthExceeded(
            # In these words client libraries recognise the case, besides by the code.
            f"This model's maximum context length is {capabilities.max_seq_len} tokens. Input "
            f"tokens exceed the configured limit of {limit} tokens; your prompt has "
            f"{len(prompt_ids)}.",
            param=param,
        )
    return prompt_ids, capabilities.max_seq_len - len(prompt_ids)


async def _echo(
    service: Service, request: RequestContext, generation: Generation, deadline: float
) -> TextDelta:
    """The prompt as the first delta; the last one too when nothing is to be generated."""
    logprobs: list[TokenLogprob] = []
    if generation.logprobs is not None:

        async def ask(lease: ReplicaLease, left: float) -> list[TokenLogprob]:
            found = await lease.engine.prompt_logprobs(generation, left, lease.metadata)
            lease.answered()
            return found

        entries = await attempt(service.replicas, request, generation, deadline, ask)
        offsets = service.prompts.vocabulary.offsets(generation.prompt_ids)
        logprobs = [replace(e, text_offset=at) for e, at in zip(entries, offsets, strict=True)]
    finish: FinishReason | None = None if generation.max_tokens else "length"
    return TextDelta(generation.echo or "", 0, finish, logprobs=tuple(logprobs))


async def generate(service: Service, request: RequestContext, batch: Batch, sink: Sink) -> None:
    """Gives `sink` the deltas of all choices as they come; the first error ends all.

    Cancelled, or at an error, it stops the engine. Raises Overloaded when it is not this request's
    turn in time, RequestTimeout at its deadline.
    """
    left = batch.deadline - asyncio.get_running_loop().time()
    turn = service.admission.permit(
        batch.tenant, batch.priority, cost=batch.places, wait_s=max(left, 0)
    )
    try:
        async with turn:
            batch.meter.began = True
            if batch.generations[0].beams:
                await _beams(service, request, batch, sink)
            elif len(batch.generations) == 1:
                await _choice(service, request, batch, 0, sink)
            else:
                await _several(service, request, batch, sink)
    except TimeoutError:
        raise RequestTimeout(batch.timeout_s) from None


async def _several(service: Service, request: RequestContext, batch: Batch, sink: Sink) -> None:
    """A task for each choice."""
    tasks = [
        asyncio.create_task(_choice(service, request, batch, index, sink))
        for index in range(len(batch.generations))
    ]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _text_stream(service: Service, generation: Generation) -> TextStream | PieceStream:
    if generation.text is None:
        return TextStream(service.prompts.vocabulary, generation)
    return PieceStream(service.prompts.tokenizer, generation)


async def _beams(service: Service, request: RequestContext, batch: Batch, sink: Sink) -> None:
    """The beams of each search, each as its only delta; the engine cannot stream them apart."""
    for start, generation in enumerate(batch.generations):
        for index, delta in enumerate(await _search(service, request, generation, batch)):
            sink.accept(start * generation.beams + index, delta)
        await sink.drain()


async def _search(
    service: Service, request: RequestContext, generation: Generation, batch: Batch
) -> list[TextDelta]:
    metrics = service.metrics

    async def ask(lease: ReplicaLease, left: float) -> list[TokenDelta]:
        with lease.engine.generate(generation, left, lease.metadata) as tokens:
            deltas = await tokens.beams()
        lease.answered()
        return deltas

    metrics.in_flight.inc()
    try:
        deltas = await attempt(service.replicas, request, generation, batch.deadline, ask)
    finally:
        metrics.in_flight.dec()
    of_model = metrics.of(generation.lora.name if generation.lora else service.settings.model_name)
    of_model.prompt_tokens.inc(len(generation.prompt_ids))
    texts = [_text_stream(service, generation).to_text(delta) for delta in deltas]
    of_model.completion_tokens.inc(sum(text.tokens for text in texts))
    for text in texts:
        batch.meter.add(text)
    return texts


async def _choice(
    service: Service, request: RequestContext, batch: Batch, index: int, sink: Sink
) -> None:
    """One generation; its last delta carries the finish reason. Raises TimeoutError."""
    generation = batch.generations[index]
    metrics = service.metrics
    model = generation.lora.name if generation.lora else service.settings.model_name
    text = _text_stream(service, generation)
    started = time.perf_counter()
    last = TextDelta("", 0)
    of_model = metrics.of(model)

    def emit(tokens: TokenDelta) -> bool:
        """Once a token, from where its bytes are received."""
        nonlocal last
        if last.finish is not None:
            return False  # it came together with the end of a stop string
        if not last.tokens and (tokens.ids or tokens.text):
            now = time.perf_counter()
            of_model.time_to_first_token.observe(now - started)
            batch.meter.first_token = batch.meter.first_token or now
        last = text.to_text(tokens)
        return sink.accept(index, last) and last.finish is None

    async def ask(lease: ReplicaLease, left: float) -> None:
        with lease.engine.generate(generation, left, lease.metadata) as tokens:
            first = await tokens.first()
            lease.answered()
            emit(first)
            while last.finish is None:
                await sink.drain()
                await tokens.feed_deltas(emit)

    metrics.in_flight.inc()
    of_model.prompt_tokens.inc(len(generation.prompt_ids))
    try:
        if generation.echo is not None:
            echoed = await _echo(service, request, generation, batch.deadline)
            sink.accept(index, echoed)
            await sink.drain()
            if not generation.max_tokens:
                last = echoed
                return
        await attempt(service.replicas, request, generation, batch.deadline, ask)
        await sink.drain()
    finally:
        metrics.in_flight.dec()
        of_model.completion_tokens.inc(last.tokens)
        batch.meter.add(last)
        of_model.duration.observe(time.perf_counter() - started)
