"""Computation of log probabilities from logits.

No other module that a chat completion needs uses numpy. So this module is imported only when logits
have been received, in the thread that processes them.

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
"""Logits of one token, [vocabulary]."""

_MAX_BLOCK_LOGITS = 512
# OpenAI's value for all very unlikely tokens. Tokens that are ruled out by a guide or a bad word
# have minus infinity, which JSON cannot express.
_MIN_LOGPROB = np.float32(-9999.0)


def generated_logprobs(
    raw: bytes,
    datatype: str,
    shape: Sequence[int],
    ids: Sequence[int],
    count: int,
    temperature: float,
) -> list[TokenLogprob]:
    """Return the log probabilities of generated tokens, each with the `count` likeliest tokens.

    All values are computed from the logits. The log probability that the engine itself reports for
    a token may differ: the logits are from before penalties, and may have half precision.

    `raw` is the output `generation_logits` of one streamed response, [1, tokens, 1, vocabulary], of
    type FP32, FP16 or BF16. The logits are divided by the temperature before the softmax over the
    complete vocabulary, as the engine does for its own log probabilities.
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
    """Return the log probabilities of prompt tokens, each with its rank.

    Each has the `count` likeliest tokens at its position, too. `raw` has for each token the logits
    that predict it, [tokens, vocabulary].
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
    """Yield the logits of each token as float32. At most one row is copied at a time."""
    kind = np.dtype(FLOATS[datatype])
    for start in range(0, len(raw), vocabulary * kind.itemsize):
        row = np.frombuffer(raw, kind, count=vocabulary, offset=start)
        yield float32(row, datatype)


def _log_softmax(logits: Logits) -> Callable[[Any], Any]:
    """Return a function that converts logits of this row to log probabilities."""
    largest = logits.max()
    work = logits - largest
    np.exp(work, out=work)
    log_sum = np.log(work.sum())
    return lambda some: np.maximum((some - largest) - log_sum, _MIN_LOGPROB)


def _find_likeliest(
    logits: Logits, values: Callable[[Any], Any], count: int
) -> list[tuple[int, float]]:
    """Return (token id, log probability) for the `count` largest logits, largest first.

    Among equal logits the lower id comes first. Only logits that may be among the largest are
    sorted: those that reach the smallest of the `count` largest maxima of blocks. There are at
    least `count` of them, one in each of these blocks. At 128,256 logits this takes a sixteenth of
    the time of `np.argpartition`.
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
