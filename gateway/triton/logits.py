"""Computation of log probabilities from logits.

This module imports numpy, which most requests do not need. So it is imported only when logits have
been received, in the thread that processes them.

See decision 041 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.deltas import TokenLogprob
from gateway.triton.numbers import FLOATS, float32

Logits = npt.NDArray[np.float32]
"""Logits of one token, shape [vocabulary]."""

_MAX_BLOCK_LOGITS = 512
# Lowest reported log probability, the same as in OpenAI's API. Tokens that guided decoding or a bad
# word excludes would have minus infinity, which JSON cannot express.
_MIN_LOGPROB = np.float32(-9999.0)


def generated_logprobs(
    raw: bytes,
    datatype: str,
    shape: Sequence[int],
    ids: Sequence[int],
    count: int,
    temperature: float,
) -> list[TokenLogprob]:
    """Return the log probabilities of generated tokens, each with the `count` most likely tokens.

    `raw` is the output `generation_logits` of one streamed response. Its shape is [1, tokens, 1,
    vocabulary], its type FP32, FP16 or BF16. As in the engine, the logits are divided by the
    temperature before the softmax over the complete vocabulary. The log probability that the engine
    itself reports for a token may differ, because the logits do not include penalties and may have
    half precision.
    """
    found = []
    for token_id, row in zip(ids, _rows(raw, datatype, shape[-1]), strict=False):
        logits = row if temperature in (0.0, 1.0) else row / np.float32(temperature)
        values = _log_softmax(logits)
        best = tuple(_find_likeliest(logits, values, count))
        found.append(TokenLogprob(token_id, float(values(logits[token_id])), best))
    return found


def token_logprobs(
    raw: bytes, datatype: str, vocabulary: int, ids: list[int], count: int
) -> list[TokenLogprob]:
    """Return the log probability and the rank of each prompt token.

    Each result also has the `count` most likely tokens at the position of the prompt token. `raw`
    has shape [tokens, vocabulary]: the logits from which the engine predicts each token in `ids`.
    """
    entries = []
    for token_id, logits in zip(ids, _rows(raw, datatype, vocabulary), strict=False):
        values = _log_softmax(logits)
        best = _find_likeliest(logits, values, count) if count else []
        rank = int(np.count_nonzero(logits >= logits[token_id]))
        value = float(values(logits[token_id]))
        entries.append(TokenLogprob(token_id, value, tuple(best), rank=rank))
    return entries


def _rows(raw: bytes, datatype: str, vocabulary: int) -> Iterator[Logits]:
    """Yield the logits of each token as float32. Only one token's logits are copied at a time."""
    kind = np.dtype(FLOATS[datatype])
    for start in range(0, len(raw), vocabulary * kind.itemsize):
        row = np.frombuffer(raw, kind, count=vocabulary, offset=start)
        yield float32(row, datatype)


def _log_softmax(logits: Logits) -> Callable[[Any], Any]:
    """Return a function that converts any selection of these `logits` to log probabilities."""
    largest = logits.max()
    work = logits - largest
    np.exp(work, out=work)
    log_sum = np.log(work.sum())
    return lambda some: np.maximum((some - largest) - log_sum, _MIN_LOGPROB)


def _find_likeliest(
    logits: Logits, values: Callable[[Any], Any], count: int
) -> list[tuple[int, float]]:
    """Return (token id, log probability) for the `count` largest logits, largest first.

    If logits are equal, the lower id comes first.

    To save time, only a few logits are sorted. The logits are divided into blocks, and the maximum
    of each block is computed. The `count`-th largest of these maxima is a threshold. At least
    `count` logits reach the threshold, so all smaller logits are ignored. With 128,256 logits, this
    takes 1/16 of the time of `np.argpartition`.
    """
    count = min(count, len(logits))
    block = min(_MAX_BLOCK_LOGITS, len(logits) // (4 * count))
    ids = np.arange(len(logits))
    if block > 1:
        covered = len(logits) // block * block
        of_blocks = logits[:covered].reshape(-1, block).max(axis=1)
        ids = np.flatnonzero(logits >= np.partition(of_blocks, -count)[-count])
    ids = ids[np.argsort(-logits[ids], kind="stable")[:count]]
    return list(zip(ids.tolist(), values(logits[ids]).tolist(), strict=True))
