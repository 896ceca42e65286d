"""Log probabilities from logits. The only user of numpy on the path of a request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gateway.deltas import TokenLogprob


def top_logprobs(
    raw: bytes, datatype: str, shape: Sequence[int], rows: int, count: int, temperature: float
) -> list[list[tuple[int, float]]]:
    """The `count` likeliest (token id, log probability) of the first `rows` tokens.

    `raw` are `generation_logits` of one streamed response, [1, tokens, 1, vocabulary], FP32, FP16
    or BF16. As with the engine's own log probabilities, the logits are divided by the temperature
    before the softmax over the whole vocabulary.
    """
    logits = _float32(raw, datatype).reshape(-1, shape[-1])[:rows]
    if temperature not in (0.0, 1.0):
        logits = logits / np.float32(temperature)
    return _best(_log_softmax(logits), count)


def prompt_logprobs(
    raw: bytes, datatype: str, shape: Sequence[int], ids: list[int], count: int
) -> list[TokenLogprob]:
    """Log probabilities of a prompt's tokens from `context_logits`, [1, tokens, vocabulary].

    The logits at one token say how likely the next is; nothing says it of the first.
    """
    values = _log_softmax(_float32(raw, datatype).reshape(-1, shape[-1])[: len(ids) - 1])
    best = _best(values, count) if count else [[] for _ in values]
    entries = [TokenLogprob(ids[0], None)]
    for row, token_id, others in zip(values, ids[1:], best, strict=True):
        entries.append(TokenLogprob(token_id, float(row[token_id]), tuple(others)))
    return entries


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    logits = logits - logits.max(axis=-1, keepdims=True)
    values: npt.NDArray[np.float32] = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return values


def _best(logits: npt.NDArray[np.float32], count: int) -> list[list[tuple[int, float]]]:
    """The `count` largest of each row with their positions, largest first."""
    count = min(count, logits.shape[-1])
    best = np.argpartition(logits, -count, axis=-1)[:, -count:]
    found = []
    for row, ids in zip(logits, best, strict=True):
        ordered = ids[np.argsort(-row[ids], kind="stable")]
        found.append([(int(token_id), float(row[token_id])) for token_id in ordered])
    return found


def _float32(raw: bytes, datatype: str) -> npt.NDArray[np.float32]:
    if datatype == "BF16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    kind = {"FP32": "<f4", "FP16": "<f2"}[datatype]
    return np.frombuffer(raw, kind).astype(np.float32, copy=False)
