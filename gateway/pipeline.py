"""The order of things for one generation, in one readable place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from gateway.errors import ContextLengthExceeded, RequestTimeout
from gateway.generation import Generation, Lora, Sampling, TextDelta
from gateway.service import Service
from gateway.text import TextStream


async def prepare(
    service: Service,
    text: str,
    *,
    request_id: str,
    sampling: Sampling,
    stop: tuple[str, ...],
    max_tokens: int | None,
    chat: bool,
    lora: Lora | None,
) -> Generation:
    """Tokenizes and fits a request into the engine's limits.

    `max_tokens` is an upper bound: what the context leaves is the default and the most. Raises
    ContextLengthExceeded when the prompt leaves no room for a single token.
    """
    dialect = service.engine.dialect
    # A chat template writes its own special tokens.
    prompt_ids = await service.prompts.encode(text, add_special_tokens=not chat)
    limit = dialect.max_seq_len - 1
    if dialect.max_input_len is not None:
        limit = min(limit, dialect.max_input_len)
    if len(prompt_ids) > limit:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {dialect.max_seq_len} tokens and the prompt "
            f"may have at most {limit}; yours has {len(prompt_ids)}.",
            param="messages" if chat else "prompt",
        )
    room = dialect.max_seq_len - len(prompt_ids)
    return Generation(
        request_id=request_id,
        prompt_ids=prompt_ids,
        max_tokens=room if max_tokens is None else min(max_tokens, room),
        sampling=sampling,
        stop=stop,
        stop_ids=service.prompts.stop_ids(stop),
        lora=lora,
    )


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
        with service.engine.generate(generation) as tokens:
            async with asyncio.timeout(service.settings.request_timeout):
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
