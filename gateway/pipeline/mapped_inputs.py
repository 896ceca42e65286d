"""Execution of requests to embedding and ranking models: inputs become arrays of numbers.

Inputs are tokenized and counted, then split into batches of the size that the model accepts. numpy
is imported when the first result arrives, so a gateway without such models does not load numpy.

See decision 005 in docs/decisions.
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
from gateway.scheduling.fair_budget import Permit
from gateway.service import Service
from gateway.tenancy.input_account import InputAccount
from gateway.tokenization.inputs import InputTokenizer
from gateway.triton.tensor_mapping import InputRow, ResolvedMapping, Rows

Vectors = Rows
FittedModel = ResolvedMapping
"""The names of a Triton model and its tensors, which match the model's configuration in Triton."""

_MAX_PENDING_BATCHES = 4
"""Maximum number of batches of one request that run or wait for a slot at the same time."""
_MAX_BATCH_BYTES = 1 << 20
# Texts are tokenized in groups of at least this many characters, in a thread. A request with fewer
# characters is one group, which may be tokenized on the event loop.
_ENCODE_STEP_CHARS = 32 * 1024
# CPU cost of tokenizing a text in addition to the cost of its characters. The unit is the cost of
# one character.
_CHARS_PER_TEXT = 16


class Deadline(NamedTuple):
    """The time limit of a request.

    Attributes:
        at: end of the time limit, in seconds of the event loop's clock.
        limit_s: length of the time limit in seconds.
        by_client: True if the client set the limit.
    """

    at: float
    limit_s: float
    by_client: bool

    @classmethod
    def after(cls, asked_s: float | None, most_s: float) -> Deadline:
        limit_s = most_s if asked_s is None else asked_s
        return cls(asyncio.get_running_loop().time() + limit_s, limit_s, asked_s is not None)

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.at - asyncio.get_running_loop().time())

    def timeout_error(self) -> RequestTimeout:
        return (ClientDeadline if self.by_client else RequestTimeout)(self.limit_s)


class MappedInputs(NamedTuple):
    """Inputs that are ready to be sent to the model.

    `rows` has one row for each input. `tokens` has the number of tokens of each row, or 0 if the
    gateway has no tokenizer for the model.
    """

    rows: list[InputRow]
    tokens: list[int]

    @property
    def total(self) -> int:
        return sum(self.tokens)


async def encode_texts(
    service: Service, model: AnyModel, texts: Sequence[tuple[str, ...]], *, tenant: str, param: str
) -> MappedInputs:
    """Return the model's inputs for `texts`. An input is one text or a pair of texts.

    Raise ContextLengthExceeded for an input that is too long.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        return MappedInputs([InputRow(texts=each) for each in texts], [0] * len(texts))
    found = MappedInputs([], [])
    for some in _split_steps(texts):
        chars = sum(map(_count_chars, some))
        encode = partial(_encode_step, tokenizer, model, some, param, len(found.rows))
        rows, tokens = await service.prompts.threads.run(tenant, chars, encode)
        found.rows.extend(rows)
        found.tokens.extend(tokens)
    return found


def _encode_step(
    tokenizer: InputTokenizer,
    model: AnyModel,
    texts: Sequence[tuple[str, ...]],
    param: str,
    start: int,
) -> MappedInputs:
    """Return the inputs for some of a request's texts; `start` is the index of the first of them.

    Checking and building the rows costs as much as tokenizing short texts, so it is done here too.
    """
    most = model.entry.max_tokens
    if most is not None:
        for number, each in enumerate(texts, start):
            if any(tokenizer.exceeds(text, most) for text in each):
                raise _too_long(param, number, most)
    encoded = tokenizer.encode(texts)
    tokens = [len(each.ids) for each in encoded]
    _check_counts(tokens, most, param, start)
    if model.mapping.texts:
        return MappedInputs([InputRow(texts=each) for each in texts], tokens)
    return MappedInputs([InputRow(ids=each.ids, types=each.types) for each in encoded], tokens)


async def check_ids(
    service: Service, model: AnyModel, given: Sequence[Sequence[int]], *, tenant: str
) -> MappedInputs:
    """Return the model's inputs for token ids, which are sent unchanged.

    Raise InvalidRequest if the model takes text, or if an id is not in its vocabulary.
    """
    tokenizer = model.tokenizer
    if model.mapping.texts or tokenizer is None:
        raise InvalidRequest(
            f"input: found token ids; the model `{model.name}` takes texts.", param="input"
        )
    counts = [len(ids) for ids in given]
    _check_counts(counts, model.entry.max_tokens, "input")
    known = range(tokenizer.vocab_size)
    rows = await service.prompts.threads.run(
        tenant, sum(counts), partial(_build_rows, given, known)
    )
    return MappedInputs(rows, counts)


def _build_rows(given: Sequence[Sequence[int]], known: range) -> list[InputRow]:
    for number, ids in enumerate(given):
        if max(ids) not in known:
            raise InvalidRequest(
                f"input[{number}]: token ids of this model are 0 to {known[-1]}.", param="input"
            )
    return [InputRow(ids=array("i", ids)) for ids in given]


def _split_steps(texts: Sequence[tuple[str, ...]]) -> Iterator[Sequence[tuple[str, ...]]]:
    start, chars, left = 0, 0, sum(map(_count_chars, texts))
    for end, each in enumerate(texts, 1):
        chars += _count_chars(each)
        if chars >= _ENCODE_STEP_CHARS and left - chars >= _ENCODE_STEP_CHARS:
            yield texts[start:end]
            start, chars, left = end, 0, left - chars
    yield texts[start:]


def _count_chars(texts: tuple[str, ...]) -> int:
    return sum(map(len, texts)) + _CHARS_PER_TEXT


def _check_counts(counts: Sequence[int], most: int | None, param: str, start: int = 0) -> None:
    """Raise InvalidRequest for an input that has no tokens, or more than `most`.

    `counts` has the number of tokens of each input. `start` is the index of the first input within
    the request, for the message.
    """
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


async def resolve_model(service: Service, model: AnyModel, deadline: Deadline) -> ResolvedMapping:
    """Return the names of the model and its tensors. Check that they match Triton's configuration.

    Raises:
        EngineUnavailable: no Triton server serves the model.
        EngineError: the mapping does not fit the model.
        RequestTimeout: the deadline has passed.
    """
    try:
        async with asyncio.timeout_at(deadline.at):
            return await service.mapped_pool.model(model.mapping)
    except TimeoutError:
        raise deadline.timeout_error() from None


def check_length(model: ResolvedMapping, inputs: MappedInputs, param: str) -> None:
    """Raise ContextLengthExceeded for an input with more token ids than the model accepts."""
    for number, row in enumerate(inputs.rows):
        if model.length is not None and len(row.ids) > model.length:
            raise _too_long(param, number, model.length, len(row.ids))


async def ask(
    service: Service,
    request: RequestContext,
    model: AnyModel,
    found: ResolvedMapping,
    inputs: MappedInputs,
    account: InputAccount,
    deadline: Deadline,
    *,
    tenant: str,
    priority: int,
) -> list[Rows]:
    """Run the model on all inputs. Return arrays of output rows, in the order of the inputs.

    Adjacent inputs are sent together as a batch. The output of each batch consists of one or more
    of the returned arrays. The first error ends all batches.

    Raise Overloaded if a batch does not get a slot in time, RequestTimeout at the deadline, and the
    errors of `MappedPool.call`.
    """
    metrics, began = service.metrics.for_mapped_model(model.name), time.perf_counter()
    admission = service.mapped_pool.admission(model.mapping.model)
    batches = list(_batches(found, inputs.rows))
    answers: list[list[Rows]] = [[] for _ in batches]
    few = asyncio.Semaphore(_MAX_PENDING_BATCHES)

    async def call(index: int, start: int, end: int) -> None:
        tokens = sum(inputs.tokens[start:end])
        account.add_sent_tokens(tokens)
        metrics.prompt_tokens.inc(tokens)
        answers[index] = await service.mapped_pool.call(
            request, model.mapping, inputs.rows[start:end], deadline.at
        )
        metrics.inputs.inc(end - start)

    def release(permit: Permit, _task: asyncio.Task[None]) -> None:
        permit.release()
        few.release()

    try:
        async with asyncio.timeout_at(deadline.at), asyncio.TaskGroup() as tasks:
            for index, (start, end) in enumerate(batches):
                await few.acquire()
                permit = await admission.permit(
                    tenant, priority, wait_s=deadline.remaining_s, is_resumed=index > 0
                ).__aenter__()
                # Release the permit in a callback of the task. If the task is cancelled before its
                # first step, a `finally` inside the task is never executed.
                task = tasks.create_task(call(index, start, end))
                task.add_done_callback(partial(release, permit))
    except TimeoutError:
        raise deadline.timeout_error() from None
    except BaseExceptionGroup as failures:
        first = failures.exceptions[0]
        raise deadline.timeout_error() if isinstance(first, TimeoutError) else first from None
    finally:
        metrics.duration.observe(time.perf_counter() - began)
    return [rows for answer in answers for rows in answer]


def _batches(model: ResolvedMapping, rows: Sequence[InputRow]) -> Iterator[tuple[int, int]]:
    """Yield a (start, end) pair of row indices for each batch; `end` is not included."""
    start, longest = 0, 0
    for number, row in enumerate(rows):
        size = sum(map(len, row.texts)) + len(row.ids)
        widest = max(longest, size)
        count = number - start
        if count == model.rows or (count and (count + 1) * model.cost(widest) > _MAX_BATCH_BYTES):
            yield start, number
            start, widest = number, size
        longest = widest
    yield start, len(rows)


def shape_vectors(rows: Rows, dimensions: int | None, *, normalize: bool) -> Rows:
    """Return the embedding vectors, each truncated to its first `dimensions` numbers.

    Scale the vectors to length 1 if `normalize` is True or if they were truncated. Raise
    InvalidRequest if the vectors have fewer than `dimensions` numbers.
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
        # Compute in float64, since the squares of large numbers overflow float32.
        lengths = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
        rows = (rows / np.where(lengths == 0, 1, lengths)).astype(np.float32)
    return np.ascontiguousarray(rows)


def to_scores(answers: Sequence[Rows], *, sigmoid: bool) -> list[float]:
    """Return one score for each output row of a ranking model.

    If `sigmoid` is True, apply the sigmoid function to each score. Raise BadModelOutput if the rows
    do not have exactly one number.
    """
    if any(rows.shape[1] != 1 for rows in answers):
        found = next(rows.shape[1] for rows in answers if rows.shape[1] != 1)
        raise BadModelOutput(f"The model gives {found} numbers for each document; it must give 1.")
    import numpy as np  # noqa: PLC0415

    values = np.concatenate(answers)[:, 0].astype(np.float64)
    if sigmoid:
        values = 0.5 * (1 + np.tanh(values / 2))
    return [float(value) for value in values]
