"""Latency of batches of random token ids, with a check that each answer starts with its prompt.

The measurement is the same as in identity_test.py of tensorrtllm_backend. A run is a number of
equal requests, one after another (sync) or all at once (async). The latency of a run is its
duration divided by the number of requests.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.triton.client import TritonClient
from gateway.triton.direct import DirectModel, replies
from ops.errors import OptionError

_WARM_UP_REQUESTS = 2

Inputs = Mapping[str, Sequence[Sequence[float]]]


class NotIdentical(Exception):
    """A response to a batch is an error, or not as expected.

    A response must have a row for each prompt, and the row must start with the prompt. The message
    is the model's error message, or describes the unexpected rows.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The batches to send: `runs` runs of `requests` requests, each a batch of `rows` prompts.

    Lengths are in tokens. Prompt ids are random and below `vocab_size`.
    """

    rows: int
    start_len: int
    output_len: int
    beam_width: int
    top_k: int
    top_p: float
    vocab_size: int
    requests: int
    runs: int
    at_once: bool
    warm_up: bool


async def measure(url: str, model: str, batches: Batches) -> float:
    """Return the average latency of one request, in milliseconds.

    Raises:
        NotIdentical: an answer is an error or lacks its prompt.
        OptionError: the model takes no token ids.
        GatewayError: Triton cannot be reached or refuses a request.
    """
    client = TritonClient(url)
    try:
        served = await DirectModel.find(client, model)
        if served.takes_text or "prompt" not in served.inputs:
            raise OptionError(f"--model-name: {model} takes no token ids.")
        drawn = random.Random(0)
        prompts = [
            [drawn.randrange(batches.vocab_size) for _ in range(batches.start_len)]
            for _ in range(batches.rows)
        ]
        inputs = _inputs(prompts, batches)
        if batches.warm_up:
            await _run(served, inputs, _WARM_UP_REQUESTS, at_once=False)
        latencies = []
        for _ in range(batches.runs):
            began = time.perf_counter()
            answers = await _run(served, inputs, batches.requests, at_once=batches.at_once)
            latencies.append(1000 * (time.perf_counter() - began) / batches.requests)
            _check(answers, prompts, batches)
        return statistics.mean(latencies)
    finally:
        await client.close()


def _inputs(prompts: list[list[int]], batches: Batches) -> Inputs:
    """Return the tensors of one request, by the model's input names.

    `input_ids` has the shape [rows, start_len]. All other tensors have the shape [rows, 1].
    """
    scalars = {
        "input_lengths": batches.start_len,
        "request_output_len": batches.output_len,
        # Set no end id: every answer then has the full length, and each run does the same work.
        "end_id": -1,
        "pad_id": 0,
        "beam_width": batches.beam_width,
        "runtime_top_k": batches.top_k,
        "runtime_top_p": batches.top_p,
        "temperature": 1,
        "len_penalty": 1,
        "repetition_penalty": 1,
        "random_seed": 0,
    }
    columns = {name: [[value]] * batches.rows for name, value in scalars.items()}
    return {"input_ids": prompts} | columns


async def _run(
    model: DirectModel, inputs: Inputs, requests: int, *, at_once: bool
) -> list[list[list[int]]]:
    """Send `requests` requests with the same inputs, one after another or all at once.

    Return a list for each request, with the token ids of the best beam of each row.
    """
    if at_once:
        return await asyncio.gather(*(_ask(model, inputs) for _ in range(requests)))
    return [await _ask(model, inputs) for _ in range(requests)]


async def _ask(model: DirectModel, inputs: Inputs) -> list[list[int]]:
    rows: dict[int, list[int]] = {}
    stream = await model.send(model.batch(uuid.uuid4().hex, inputs))
    try:
        async for reply in replies(stream):
            if reply.error:
                raise NotIdentical(reply.error)
            ids, index = reply.array("output_ids"), reply.array("batch_index")
            if ids is not None:
                # Store each row by its index in the batch: with in-flight batching, Triton sends
                # rows in the order in which they are completed.
                first = 0 if index is None else int(index.reshape(-1)[0])
                rows |= {first + at: beams[0].tolist() for at, beams in enumerate(ids)}
    finally:
        stream.cancel()
    return [rows[index] for index in sorted(rows)]


def _check(answers: list[list[list[int]]], prompts: list[list[int]], batches: Batches) -> None:
    """Raise NotIdentical if an answer lacks rows, or a row does not start with its prompt."""
    for rows in answers:
        if len(rows) != batches.rows:
            raise NotIdentical(f"{len(rows)} rows of {batches.rows} came back")
        for row, prompt in zip(rows, prompts, strict=True):
            if row[: len(prompt)] != prompt:
                raise NotIdentical(f"a row came back as {row}, and was sent as {prompt}")
