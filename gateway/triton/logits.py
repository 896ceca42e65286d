"""Log probabilities from logits. The only user of numpy on the path of a chat.

So this module is imported only once logits have come, in the thread that works on them.

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
# OpenAI's value for anything less likely. Tokens ruled out by a guide or a bad word have minus
# infinity, which JSON cannot express.
_MIN_LOGPROB = np.float32(-9999.0)


def generated_logprobs(
    raw: bytes,
    datatype: str,
    shape: Sequence[int],
    ids: Sequence[int],
    count: int,
    temperature: float,
) -> list[TokenLogprob]:
    """Return the log probabilities of generated tokens, each with the `count` likeliest ones.

    All values of a token come from the same logits. The engine's own value may differ from its
    entry among the likeliest ones: logits are from before penalties, and may be of half precision.

    `raw` are `generation_logits` of one streamed response, [1, tokens, 1, vocabulary], FP32, FP16
    or BF16. As in the engine's own log probabilities, the logits are divided by the temperature
    before the softmax over the complete vocabulary.
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
    """Return the log probabilities of prompt tokens, each with the `count` likeliest at its
    position.

    `raw` are the logits before each token, [tokens, vocabulary].
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
    """Yield the logits of each token, copying one row at a time, if at all."""
    kind = np.dtype(FLOATS[datatype])
    for start in range(0, len(raw), vocabulary * kind.itemsize):
        row = np.frombuffer(raw, kind, count=vocabulary, offset=start)
        yield float32(row, datatype)


def _log_softmax(logits: Logits) -> Callable[[Any], Any]:
    """Return a function from logits of this row to log probabilities."""
    largest = logits.max()
    work = logits - largest
    np.exp(work, out=work)
    log_sum = np.log(work.sum())
    return lambda some: np.maximum((some - largest) - log_sum, _MIN_LOGPROB)


def _find_likeliest(
    logits: Logits, values: Callable[[Any], Any], count: int
) -> list[tuple[int, float]]:
    """Return the `count` largest with their positions, largest first; among equals the first.

    Only candidates are sorted: at least `count` logits reach the smallest of the `count` largest
    block maxima. At 128,256 logits that takes a sixteenth of the time of `np.argpartition`.
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
