"""Choice of the next token: TensorRT-LLM's sampling pipeline, vectorised over the batch.

The steps have the order of TensorRT-LLM's decoding layers: embedding bias, temperature, repetition,
presence and frequency penalty, minimum length, banned ids, and the choice itself. The penalties
also count prompt tokens. One behaviour differs: temperature 0 is always greedy here. TensorRT-LLM
samples at temperature 1 if a request has temperature 0 and top_p, but no other sampling parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.request import Request
from triton_repo.cpu_executor.words import BadWords, list_repeating

Array = NDArray[np.float32]
LOWEST = np.finfo(np.float32).min
# The largest top_k that TensorRT-LLM uses.
MAX_TOP_K = 1024
GROUP = 64


class TokenCounts:
    """Number of occurrences of each token id in one sequence, including its prompt."""

    def __init__(self, vocab_size: int, ids: Sequence[int]) -> None:
        self._counts = np.zeros(vocab_size, np.int32)
        inside = np.array([i for i in ids if 0 <= i < vocab_size], np.int64)
        np.add.at(self._counts, inside, 1)
        self._seen = np.unique(inside).tolist()

    def add(self, token: int) -> None:
        if self._counts[token] == 0:
            self._seen.append(token)
        self._counts[token] += 1

    def copy(self) -> TokenCounts:
        twin = object.__new__(TokenCounts)
        twin._counts = self._counts.copy()
        twin._seen = list(self._seen)
        return twin

    def penalise(self, logits: Array, repetition: float, presence: float, frequency: float) -> None:
        """Apply the three penalties to one row of logits ``[vocab]``, in place."""
        seen = np.array(self._seen, np.int64)
        values = logits[seen]
        if repetition != 1:
            factor = np.float32(repetition)
            values = np.where(values < 0, values * factor, values / factor)
        values -= np.float32(presence)
        values -= np.float32(frequency) * self._counts[seen]
        logits[seen] = values


class SamplingState:
    """Sampling parameters of one sequence, and the values that change with each generated token.

    These values are the token counts for penalties, the current top_p, and the random generator.
    ``index`` is the sequence's index among the request's samples. It is added to the seed, so the
    samples differ.
    """

    def __init__(self, request: Request, index: int, vocab_size: int) -> None:
        config = request.sampling_config
        greedy = config.temperature == 0
        temperature = 1.0 if config.temperature is None or greedy else config.temperature
        self.scale = 1.0 if temperature == 1 else 1 / (temperature + 1e-6)
        top_k = min(config.top_k or 0, MAX_TOP_K, vocab_size)
        self.greedy = greedy or top_k == 1 or (top_k == 0 and config.top_p is None)
        self.top_k = 1 if self.greedy else top_k
        self.top_p = 1.0 if config.top_p is None else config.top_p
        self._first_top_p = self.top_p
        self._top_p_decay = config.top_p_decay or 1.0
        self._top_p_min = config.top_p_min or 1e-6
        self._top_p_reset = -1 if config.top_p_reset_ids is None else config.top_p_reset_ids
        self.bias = request.embedding_bias
        self.repetition = config.repetition_penalty or 1.0
        self.presence = config.presence_penalty or 0.0
        self.frequency = config.frequency_penalty or 0.0
        self.end_id = -1 if request.end_id is None else request.end_id
        self.min_tokens = config.min_tokens or 0
        self.log_probs = request.output_config.return_log_probs
        penalised = (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)
        self.counts = TokenCounts(vocab_size, request.input_token_ids) if penalised else None
        self.bad_words = BadWords(request.bad_words) if request.bad_words else None
        self.ngram_size = config.no_repeat_ngram_size or 0
        self.plain = (
            self.bias is None
            and self.scale == 1
            and self.counts is None
            and self.min_tokens == 0
            and self.bad_words is None
            and self.ngram_size == 0
        )
        self._random = None if self.greedy else np.random.default_rng((config.seed or 0) + index)

    def draw(self) -> float:
        """Return the sequence's next random number, uniform in [0, 1)."""
        assert self._random is not None
        return self._random.random()

    def fork(self) -> SamplingState:
        """Return a copy for another beam that continues this sequence."""
        twin = copy.copy(self)
        twin.counts = None if self.counts is None else self.counts.copy()
        return twin

    def accept(self, token: int) -> None:
        """Update token counts and top_p with a chosen token."""
        if self.counts is not None:
            self.counts.add(token)
        if self._top_p_decay != 1:
            if token == self._top_p_reset:
                self.top_p = self._first_top_p
            else:
                self.top_p = max(self.top_p * self._top_p_decay, self._top_p_min)


@dataclass
class SamplingRow:
    """The sequence to which one row of logits belongs.

    ``prompt`` and ``generated`` are token ids.
    """

    state: SamplingState
    prompt: Sequence[int]
    generated: Sequence[int]


def process(logits: Array, rows: Sequence[SamplingRow]) -> None:
    """Apply all steps that precede the choice to logits ``[rows, vocab]``, in place.

    The steps are bias, temperature, penalties, minimum length and banned ids.
    """
    for line, row in zip(logits, rows, strict=True):
        state = row.state
        if state.plain:
            continue
        if state.bias is not None:
            np.add(line, state.bias, out=line)
        if state.scale != 1:
            np.multiply(line, np.float32(state.scale), out=line)
        if state.counts is not None:
            state.counts.penalise(line, state.repetition, state.presence, state.frequency)
        if len(row.generated) < state.min_tokens and state.end_id >= 0:
            line[state.end_id] = LOWEST
        if state.bad_words is not None or state.ngram_size > 0:
            _ban(line, row)


def _ban(line: Array, row: SamplingRow) -> None:
    ids = [*row.prompt, *row.generated]
    banned: list[int] = []
    if row.state.ngram_size > 0:
        banned += list_repeating(ids, row.state.ngram_size)
    if row.state.bad_words is not None:
        banned += row.state.bad_words.list_banned(ids)
    line[[i for i in banned if 0 <= i < len(line)]] = LOWEST


def choose(
    logits: Array, states: Sequence[SamplingState], normalize_log_probs: bool
) -> tuple[list[int], list[float]]:
    """Choose one token per row of processed logits ``[rows, vocab]``.

    Return the token ids and their log probabilities. If a request did not ask for log
    probabilities, the value of its row is 0.0.

    By default, probabilities are normalized over the complete vocabulary. If
    ``normalize_log_probs`` is True, the probabilities in a row with top_k are normalized over the
    ``top_k`` best ids. With this setting, the log probability of a greedy row's token is 0.
    """
    tokens = np.argmax(logits, axis=1)
    drawn = [i for i, state in enumerate(states) if not state.greedy]
    if drawn:
        chosen = [states[i] for i in drawn]
        weights = _weights(logits[drawn])
        truncated = [i for i, s in enumerate(chosen) if s.top_k > 0 or s.top_p < 1]
        if truncated:
            kept = weights[truncated]
            truncate(
                kept,
                np.array([chosen[i].top_k for i in truncated]),
                np.array([chosen[i].top_p for i in truncated]),
            )
            weights[truncated] = kept
        tokens[drawn] = draw(weights, np.array([s.draw() for s in chosen]))
    picked: list[int] = tokens.tolist()
    log_probs = [
        _log_prob(logits[i], token, state.top_k if normalize_log_probs else 0)
        if state.log_probs
        else 0.0
        for i, (token, state) in enumerate(zip(picked, states, strict=True))
    ]
    return picked, log_probs


def _weights(logits: Array) -> Array:
    """Return unnormalized probabilities: ``exp(logit - max)`` per row."""
    weights: Array = logits - logits.max(axis=1, keepdims=True)
    return np.exp(weights, out=weights)


def truncate(weights: Array, top_k: NDArray[np.int64], top_p: NDArray[np.float64]) -> None:
    """Set the weights of ids that top_k and top_p exclude to 0, in place.

    ``weights`` is ``[rows, vocab]``.

    First keep the ``top_k`` ids with the largest weights (0: all). Then keep the fewest of these
    ids whose weights sum to at least the fraction ``top_p``. For equal weights the lower id comes
    first.
    """
    vocab = weights.shape[1]
    limit = np.where(top_k > 0, np.minimum(top_k, vocab), vocab)
    ordered = np.sort(weights, axis=1)[:, ::-1]
    longest = int(limit.max())
    mass = np.cumsum(ordered[:, :longest], axis=1, dtype=np.float64)
    total = np.take_along_axis(mass, limit[:, None] - 1, axis=1)
    nucleus = np.count_nonzero(mass < top_p[:, None] * total, axis=1) + 1
    count = np.where(top_p < 1, np.minimum(nucleus, limit), limit)
    threshold = np.take_along_axis(ordered, count[:, None] - 1, axis=1)
    kept = weights >= threshold
    weights *= kept
    surplus = np.count_nonzero(kept, axis=1) - count
    for row in np.flatnonzero(surplus > 0):
        equal = np.flatnonzero(weights[row] == threshold[row])
        weights[row, equal[len(equal) - surplus[row] :]] = 0


def draw(weights: Array, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Draw one id per row with a probability proportional to the id's weight, by inverting the CDF.

    ``uniform`` has a number in [0, 1) per row. The search first finds a group of `GROUP` ids, and
    then the id in the group. This is several times cheaper than one search over all ids.
    """
    rows, vocab = weights.shape
    padded = weights
    if vocab % GROUP:
        padded = np.zeros((rows, -(-vocab // GROUP) * GROUP), np.float32)
        padded[:, :vocab] = weights
    groups = padded.reshape(rows, -1, GROUP)
    ends = np.cumsum(np.add.reduce(groups, axis=2), axis=1, dtype=np.float64)
    target = uniform * ends[:, -1]
    # Keep the target below the total. A target that rounding has made equal to the total would be
    # in no group.
    target = np.minimum(target, np.nextafter(ends[:, -1], 0))
    group = np.count_nonzero(ends <= target[:, None], axis=1)
    line = np.arange(rows)
    inside = groups[line, group]
    before = np.where(group > 0, ends[line, group - 1], 0)
    reached = np.cumsum(inside, axis=1, dtype=np.float64) + before[:, None] > target[:, None]
    # Because of rounding, the target may be just above the cumulative sum at the end of the group
    # that was found. In this case, use the group's last id with a positive weight.
    last = GROUP - 1 - np.argmax(inside[:, ::-1] > 0, axis=1)
    offset = np.where(reached.any(axis=1), np.argmax(reached, axis=1), last)
    return np.asarray(group * GROUP + offset, np.int64)


def _log_prob(line: Array, token: int, top_k: int) -> float:
    """Return the log probability of an id, normalized over the ``top_k`` best ids.

    If ``top_k`` is 0, the probability is normalized over the complete vocabulary.
    """
    if top_k == 1:
        return 0.0
    values = np.sort(line)[-top_k:] if top_k else line
    top = float(line.max())
    total = float(np.exp(values.astype(np.float64) - top).sum())
    return float(line[token]) - top - float(np.log(total))
