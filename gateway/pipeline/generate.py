"""From prepared generations to the deltas of their answer."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from gateway.deltas import FinishReason, Sink, TextDelta, TokenDelta, TokenLogprob
from gateway.errors import RequestTimeout
from gateway.generation import Batch, Generation
from gateway.observability.request_context import RequestContext
from gateway.scheduling.attempts import attempt
from gateway.scheduling.replica import ReplicaLease
from gateway.service import Service
from gateway.tokenization.piece_stream import PieceStream
from gateway.tokenization.text_stream import TextStream


async def generate(service: Service, request: RequestContext, batch: Batch, sink: Sink) -> None:
    """Gives `sink` the deltas of all choices as they come; the first error ends all.

    Cancelled, or at an error, it stops the engine. Raises Overloaded when it is not this request's
    turn in time, RequestTimeout at its deadline.
    """
    left = batch.deadline - asyncio.get_running_loop().time()
    turn = service.admission.permit(
        batch.caller.tenant, batch.caller.priority, cost=batch.places, wait_s=max(left, 0)
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


def _model_name(service: Service, generation: Generation) -> str:
    """What metrics call the model that answers: the adapter, or the base model."""
    lora = generation.params.lora
    return lora.name if lora else service.settings.model_name


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
    of_model = metrics.of(_model_name(service, generation))
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
    text = _text_stream(service, generation)
    started = time.perf_counter()
    last = TextDelta("", 0)
    of_model = metrics.of(_model_name(service, generation))

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


async def _echo(
    service: Service, request: RequestContext, generation: Generation, deadline: float
) -> TextDelta:
    """The prompt as the first delta; the last one too when nothing is to be generated."""
    logprobs: list[TokenLogprob] = []
    if generation.params.logprobs is not None:

        async def ask(lease: ReplicaLease, left: float) -> list[TokenLogprob]:
            found = await lease.engine.prompt_logprobs(generation, left, lease.metadata)
            lease.answered()
            return found

        entries = await attempt(service.replicas, request, generation, deadline, ask)
        offsets = service.prompts.vocabulary.offsets(generation.prompt_ids)
        logprobs = [replace(e, text_offset=at) for e, at in zip(entries, offsets, strict=True)]
    finish: FinishReason | None = None if generation.max_tokens else "length"
    return TextDelta(generation.echo or "", 0, finish, logprobs=tuple(logprobs))
