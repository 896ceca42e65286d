"""Inputs to rows of numbers: tokenized and counted, then cut into the model's batches and asked.

numpy has been loaded once there are rows (`triton.mapped`), and is not for gateways without them.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

from gateway.catalog.mapped import AnyModel
from gateway.errors import (
    BadModelOutput,
    ClientDeadline,
    ContextLengthExceeded,
    InvalidRequest,
    RequestTimeout,
)
from gateway.observability.request_context import RequestContext
from gateway.scheduling.admission import Permit
from gateway.service import Service
from gateway.tenancy.input_account import InputAccount
from gateway.tokenization.inputs import InputIds
from gateway.triton.mapped import MappedModel, Row, Rows

Vectors = Rows
Found = MappedModel
"""A mapping that fits what Triton has."""

_AT_ONCE = 4
"""Batches of one request that are asked or wait to be."""
_BATCH_BYTES = 1 << 20
# Characters that are tokenized in one turn. A job of few is done on the event loop.
_TURN_CHARS = 32 * 1024
# An empty text takes as long as so many characters.
_CHARS_A_TEXT = 16


class Deadline(NamedTuple):
    """`at` is in the event loop's time; `asked` says that the client wants it before all others."""

    at: float
    limit_s: float
    asked: bool

    @classmethod
    def of(cls, asked_s: float | None, most_s: float) -> Deadline:
        limit_s = most_s if asked_s is None else asked_s
        return cls(asyncio.get_running_loop().time() + limit_s, limit_s, asked_s is not None)

    @property
    def left_s(self) -> float:
        return max(0.0, self.at - asyncio.get_running_loop().time())

    def missed(self) -> RequestTimeout:
        return (ClientDeadline if self.asked else RequestTimeout)(self.limit_s)


class Inputs(NamedTuple):
    """Ready to be sent. `tokens` are those of each row, 0 where they are not counted."""

    rows: list[Row]
    tokens: list[int]

    @property
    def total(self) -> int:
        return sum(self.tokens)


async def of_texts(
    service: Service, model: AnyModel, texts: Sequence[tuple[str, ...]], *, tenant: str, param: str
) -> Inputs:
    """Of single texts, or of pairs. Raises ContextLengthExceeded for one that is too long."""
    tokenizer, most = model.tokenizer, model.entry.max_tokens
    if tokenizer is None:
        return Inputs([Row(texts=each) for each in texts], [0] * len(texts))
    found: list[InputIds] = []
    for some in _turns(texts):
        if most is not None:
            for number, each in enumerate(some, len(found)):
                if any(tokenizer.exceeds(text, most) for text in each):
                    raise _too_long(param, number, most)
        chars = sum(map(_count_chars, some))
        encode = partial(tokenizer.encode, some)
        new = await service.prompts.turns.run(tenant, chars, encode)
        _check([len(each.ids) for each in new], most, param, len(found))
        found += new
    tokens = [len(each.ids) for each in found]
    if model.mapping.texts:
        return Inputs([Row(texts=each) for each in texts], tokens)
    return Inputs([Row(ids=each.ids, types=each.types) for each in found], tokens)


async def of_ids(
    service: Service, model: AnyModel, given: Sequence[Sequence[int]], *, tenant: str
) -> Inputs:
    """As they are. Raises InvalidRequest where the model takes text, or does not know an id."""
    tokenizer = model.tokenizer
    if model.mapping.texts or tokenizer is None:
        raise InvalidRequest(
            f"input: found token ids; the model `{model.name}` takes texts.", param="input"
        )
    counts = [len(ids) for ids in given]
    _check(counts, model.entry.max_tokens, "input")
    known = range(tokenizer.vocab_size)
    rows = await service.prompts.turns.run(tenant, sum(counts), partial(_rows, given, known))
    return Inputs(rows, counts)


def _rows(given: Sequence[Sequence[int]], known: range) -> list[Row]:
    for number, ids in enumerate(given):
        if max(ids) not in known:
            raise InvalidRequest(
                f"input[{number}]: token ids of this model are 0 to {known[-1]}.", param="input"
            )
    return [Row(ids=array("i", ids)) for ids in given]


def _turns(texts: Sequence[tuple[str, ...]]) -> Iterator[Sequence[tuple[str, ...]]]:
    start, chars = 0, 0
    for end, each in enumerate(texts, 1):
        chars += _count_chars(each)
        if chars >= _TURN_CHARS:
            yield texts[start:end]
            start, chars = end, 0
    if start < len(texts):
        yield texts[start:]


def _count_chars(texts: tuple[str, ...]) -> int:
    return sum(map(len, texts)) + _CHARS_A_TEXT


def _check(counts: Sequence[int], most: int | None, param: str, start: int = 0) -> None:
    """Tokens of each input, of which the first is the request's `start`th."""
    for number, count in enumerate(counts, start):
        if most is not None and count > most:
            raise _too_long(param, number, most, count)
        if not count:
            raise InvalidRequest(f"{param}[{number}]: it has no tokens.", param=param)


def _too_long(param: str, number: int, most: int, count: int | None = None) -> InvalidRequest:
    found = f"more than {most}" if count is None else str(count)
    return ContextLengthExceeded(
        f"{param}[{number}]: found {found} tokens; this model takes {most}.", param=param
    )


async def mapped_model(service: Service, model: AnyModel, deadline: Deadline) -> MappedModel:
    """What Triton says of it. Raises EngineUnavailable, EngineError where the mapping does not
    fit, and RequestTimeout."""
    try:
        async with asyncio.timeout_at(deadline.at):
            return await service.mapped_pool.model(model.mapping)
    except TimeoutError:
        raise deadline.missed() from None


def check_length(model: MappedModel, inputs: Inputs, param: str) -> None:
    """Raises ContextLengthExceeded for what is longer than the tensors of the model."""
    for number, row in enumerate(inputs.rows):
        if model.length is not None and len(row.ids) > model.length:
            raise _too_long(param, number, model.length, len(row.ids))


async def ask(
    service: Service,
    request: RequestContext,
    model: AnyModel,
    found: MappedModel,
    inputs: Inputs,
    account: InputAccount,
    deadline: Deadline,
    *,
    tenant: str,
    priority: int,
) -> list[Rows]:
    """The model's rows, in order, some of them in each of the list; the first error ends all.

    Raises Overloaded when it is not the request's turn in time, RequestTimeout at its deadline, and
    what `MappedPool.call` raises.
    """
    metrics, began = service.metrics.of_mapped(model.name), time.perf_counter()
    admission = service.mapped_pool.admission(model.mapping.model)
    batches = list(_batches(found, inputs.rows))
    answers: list[list[Rows]] = [[] for _ in batches]
    few = asyncio.Semaphore(_AT_ONCE)

    async def call(index: int, start: int, end: int) -> None:
        tokens = sum(inputs.tokens[start:end])
        account.add_sent_tokens(tokens)
        metrics.prompt_tokens.inc(tokens)
        answers[index] = await service.mapped_pool.call(
            request, model.mapping, inputs.rows[start:end], deadline.at
        )
        metrics.inputs.inc(end - start)

    def leave(permit: Permit, _task: asyncio.Task[None]) -> None:
        permit.release()
        few.release()

    try:
        async with asyncio.timeout_at(deadline.at), asyncio.TaskGroup() as tasks:
            for index, (start, end) in enumerate(batches):
                await few.acquire()
                permit = await admission.permit(
                    tenant, priority, wait_s=deadline.left_s, is_resumed=index > 0
                ).__aenter__()
                # Not in the task: cancelled before its first step, it would never come there.
                task = tasks.create_task(call(index, start, end))
                task.add_done_callback(partial(leave, permit))
    except TimeoutError:
        raise deadline.missed() from None
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise deadline.missed() if isinstance(first, TimeoutError) else first from None
    finally:
        metrics.duration.observe(time.perf_counter() - began)
    return [rows for answer in answers for rows in answer]


def _batches(model: MappedModel, rows: Sequence[Row]) -> Iterator[tuple[int, int]]:
    """Places of the first row of each and of the one behind its last."""
    start, longest = 0, 0
    for number, row in enumerate(rows):
        size = sum(map(len, row.texts)) + len(row.ids)
        widest = max(longest, size)
        count = number - start
        if count == model.rows or (count and (count + 1) * model.cost(widest) > _BATCH_BYTES):
            yield start, number
            start, widest = number, size
        longest = widest
    yield start, len(rows)


def shaped(rows: Rows, dimensions: int | None, *, normalize: bool) -> Rows:
    """Cut to so many numbers each, and of length 1 where that is wanted or they were cut.

    Raises InvalidRequest where they have fewer.
    """
    width = rows.shape[1]
    if dimensions is not None and dimensions > width:
        raise InvalidRequest(
            f"dimensions: found {dimensions}; this model's embeddings have {width}.",
            param="dimensions",
        )
    if dimensions is not None and dimensions < width:
        rows, normalize = rows[:, :dimensions], True
    import numpy as np  # noqa: PLC0415

    if normalize:
        # In float64: the squares of large numbers are more than float32 holds.
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
        rows = (rows / np.where(lengths == 0, 1, lengths)).astype(np.float32)
    return np.ascontiguousarray(rows)


def scores(answers: Sequence[Rows], *, sigmoid: bool) -> list[float]:
    """One of each row. Raises BadModelOutput where the model gives more than one."""
    if any(rows.shape[1] != 1 for rows in answers):
        found = next(rows.shape[1] for rows in answers if rows.shape[1] != 1)
        raise BadModelOutput(f"The model gives {found} numbers for each document; it must give 1.")
    import numpy as np  # noqa: PLC0415

    values = np.concatenate(answers)[:, 0].astype(np.float64)
    if sigmoid:
        values = 0.5 * (1 + np.tanh(values / 2))
    return [float(value) for value in values]
