"""Beam search of one request.

A step follows TensorRT-LLM's beam search layer:

1. Add the log probabilities of the next tokens to the score of each live (unfinished) beam.
2. Take the best ``2 * beam_width`` continuations.
3. If one of the best ``beam_width`` continuations has ended, move it to the finished beams.
4. Continue with the best ``beam_width`` continuations that have not ended.

The score of a finished beam is ``cum_log_prob / length^length_penalty``. Once ``beam_width`` beams
are finished, the search ends at a time that depends on ``early_stopping``:

- 1: at once.
- 0: when no live beam is better than the worst finished beam.
- Other values: when no live beam can become better than the worst finished beam.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.active import ActiveRequest
from triton_repo.cpu_executor.enums import FinishReason
from triton_repo.cpu_executor.sampling import SamplingRow, process
from triton_repo.cpu_executor.sequence import Sequence

Array = NDArray[np.float32]


@dataclass(slots=True)
class _Beam:
    tokens: list[int]
    log_probs: list[float]
    cum_log_prob: float
    logits: list[Array]
    parent: int
    reason: FinishReason = FinishReason.NOT_FINISHED
    end_log_prob: float = 0.0


class BeamSearch:
    def __init__(self, request: ActiveRequest) -> None:
        config = request.sampling
        self._request = request
        self._width = request.beam_width
        self._length_penalty = config.length_penalty or 0.0
        self._early_stopping = 1 if config.early_stopping is None else config.early_stopping
        self._diversity = config.beam_search_diversity_rate or 0.0
        self._finished: list[_Beam] = []

    def step(self, live: Seq[Sequence], logits: Array) -> None:
        """Continue each live beam by one token.

        In the first step only one beam is live, and its best continuations become the other beams.
        ``logits`` is ``[live, vocab]`` and is modified.
        """
        request = self._request
        keep_logits = request.output.return_generation_logits and not request.streaming
        raw = logits.copy() if keep_logits else None
        rows = []
        for sequence in live:
            assert sequence.sampling is not None
            rows.append(SamplingRow(sequence.sampling, request.prompt, sequence.tokens))
        process(logits, rows)
        going: list[_Beam] = []
        for rank, (parent, token, log_prob) in enumerate(self._candidates(live, logits)):
            beam = self._continue_beam(live[parent], parent, token, log_prob)
            if raw is not None:
                beam.logits = [*live[parent].logits, raw[parent]]
            if beam.reason is FinishReason.NOT_FINISHED:
                going.append(beam)
            elif rank < self._width:
                self._finished.append(beam)
            if len(going) == self._width:
                break
        self._finished.sort(key=self._score, reverse=True)
        del self._finished[self._width :]
        if self._is_done(going):
            self._finish()
        else:
            self._move(live, going)

    def _candidates(self, live: Seq[Sequence], logits: Array) -> list[tuple[int, int, float]]:
        """Return the best ``2 * width`` continuations, the best first.

        A continuation is a tuple (index of the beam in ``live``, token id, log probability).
        """
        log_probs = log_softmax(logits)
        count = min(2 * self._width, logits.shape[1])
        best = np.argsort(-log_probs, axis=1, kind="stable")[:, :count]
        values = np.take_along_axis(log_probs, best, axis=1)
        scores = values + np.array([[s.cum_log_prob] for s in live])
        scores += self._diversity * np.arange(count)
        order = np.argsort(-scores, axis=None, kind="stable")[: 2 * self._width]
        return [(int(i) // count, int(best.flat[i]), float(values.flat[i])) for i in order]

    def _continue_beam(self, parent: Sequence, index: int, token: int, log_prob: float) -> _Beam:
        request = self._request
        beam = _Beam(parent.tokens, parent.log_probs, parent.cum_log_prob, parent.logits, index)
        if token == request.end_id:
            # Include the end id in the score, but return neither the id nor its log probability.
            beam.reason = FinishReason.END_ID
            beam.end_log_prob = log_prob
            return beam
        beam.tokens = [*parent.tokens, token]
        beam.log_probs = [*parent.log_probs, log_prob]
        beam.cum_log_prob += log_prob
        if request.stop_words is not None and request.stop_words.match(beam.tokens):
            beam.reason = FinishReason.STOP_WORDS
        elif len(beam.tokens) >= request.max_tokens:
            beam.reason = FinishReason.LENGTH
        return beam

    def _score(self, beam: _Beam) -> float:
        return self._normalize_score(beam.cum_log_prob + beam.end_log_prob, len(beam.tokens))

    def _normalize_score(self, cum_log_prob: float, length: int) -> float:
        return cum_log_prob / math.pow(max(length, 1), self._length_penalty)

    def _is_done(self, going: Seq[_Beam]) -> bool:
        if not going:
            return True
        if len(self._finished) < self._width:
            return False
        if self._early_stopping == 1:
            return True
        length = len(going[0].tokens)
        if self._early_stopping != 0 and self._length_penalty > 0:
            length = self._request.max_tokens
        best = max(beam.cum_log_prob for beam in going)
        return self._normalize_score(best, length) <= self._score(self._finished[-1])

    def _finish(self) -> None:
        ended = self._finished
        # If there are fewer than ``width`` finished beams, repeat the worst one. This happens if
        # stop words have ended all continuations in the same step.
        ended += ended[-1:] * (self._width - len(ended))
        longest = max(len(beam.tokens) for beam in ended)
        for sequence, beam in zip(self._request.sequences, ended, strict=True):
            self._write(sequence, beam)
            # Pad the log probabilities to equal lengths: model.py makes one array of all beams.
            sequence.log_probs = beam.log_probs + [-1.0] * (longest - len(beam.log_probs))
            sequence.finish = beam.reason
            sequence.cache = None

    def _move(self, live: Seq[Sequence], going: Seq[_Beam]) -> None:
        """Give each continuing beam its parent's KV cache and sampling state.

        The first child of a parent gets the cache itself; all other children get a copy.
        """
        parents = [(sequence.cache, sequence.sampling) for sequence in live]
        taken: set[int] = set()
        for sequence, beam in zip(self._request.sequences, going, strict=True):
            cache, state = parents[beam.parent]
            assert cache is not None
            assert state is not None
            sequence.cache = cache.fork() if beam.parent in taken else cache
            sequence.sampling = state.fork()
            sequence.sampling.accept(beam.tokens[-1])
            taken.add(beam.parent)
            self._write(sequence, beam)

    def _write(self, sequence: Sequence, beam: _Beam) -> None:
        sequence.tokens = beam.tokens
        sequence.log_probs = beam.log_probs
        sequence.cum_log_prob = beam.cum_log_prob
        sequence.logits = beam.logits


def log_softmax(logits: Array) -> NDArray[np.float64]:
    """Return the log softmax per row, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result
