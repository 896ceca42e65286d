"""Choice of the next tokens from the logits of one iteration."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.active import ActiveRequest
from triton_repo.cpu_executor.beam import BeamSearch
from triton_repo.cpu_executor.enums import FinishReason
from triton_repo.cpu_executor.guide import GuideError
from triton_repo.cpu_executor.sampling import LOWEST, SamplingRow, SamplingState, choose, process
from triton_repo.cpu_executor.sequence import Sequence
from triton_repo.cpu_executor.words import StopWords

Array = NDArray[np.float32]


class SequenceDecoder:
    """Decoder that chooses the next token of each sequence, and finds out if a sequence ends."""

    def __init__(self, vocab_size: int, normalize_log_probs: bool) -> None:
        self._vocab_size = vocab_size
        self._normalize = normalize_log_probs

    def prepare(self, request: ActiveRequest) -> None:
        """Create the decoding state of a request's sequences. Call this before its first step.

        Raises ``GuideError`` if the guide (grammar) could not be compiled. As in TensorRT-LLM, this
        error ends the step and all requests in the step.
        """
        request.stop_words = StopWords(request.request.stop_words or ())
        for sequence in request.sequences:
            index = sequence.index if request.beam_width == 1 else 0
            sequence.sampling = SamplingState(request.request, index, self._vocab_size)
            if request.guide is not None:
                sequence.guide = request.guide.result().fork()
        if request.beam_width > 1:
            request.beams = BeamSearch(request)

    def decode(self, ready: Seq[tuple[ActiveRequest, Sequence]], logits: Array) -> None:
        """Choose and append one token for each sequence in ``ready``.

        ``logits`` is ``[len(ready), vocab]``: the logits of the next token of each sequence.
        """
        samples = [i for i, (request, _) in enumerate(ready) if request.beams is None]
        if samples:
            own = logits if len(samples) == len(ready) else logits[samples]
            self._sample([ready[i] for i in samples], own)
        beams: dict[int, list[int]] = {}
        for i, (request, _) in enumerate(ready):
            if request.beams is not None:
                beams.setdefault(request.id, []).append(i)
        for indices in beams.values():
            request = ready[indices[0]][0]
            assert request.beams is not None
            request.beams.step([ready[i][1] for i in indices], logits[indices])

    def _sample(self, ready: Seq[tuple[ActiveRequest, Sequence]], logits: Array) -> None:
        states = []
        rows = []
        for i, (request, sequence) in enumerate(ready):
            assert sequence.sampling is not None
            states.append(sequence.sampling)
            rows.append(SamplingRow(sequence.sampling, request.prompt, sequence.tokens))
            if request.output.return_generation_logits:
                sequence.logits.append(logits[i].copy())
        process(logits, rows)
        for line, (request, sequence) in zip(logits, ready, strict=True):
            if sequence.guide is not None:
                _mask(request, sequence, line)
        tokens, log_probs = choose(logits, states, self._normalize)
        for (request, sequence), token, log_prob in zip(ready, tokens, log_probs, strict=True):
            if request.failure is None and accept(request, sequence, token, log_prob):
                assert sequence.sampling is not None
                sequence.sampling.accept(token)
                if sequence.guide is not None:
                    _follow(request, sequence, token)


def _mask(request: ActiveRequest, sequence: Sequence, line: Array) -> None:
    """Set the logits of ids that the request's guide (grammar) forbids to -inf, in place.

    The guide takes precedence over banned ids: if it allows only banned ids, one of them is chosen.
    It also takes precedence over the minimum length: if it allows only end ids, one of them is
    chosen even below the minimum length.
    """
    assert sequence.guide is not None
    assert sequence.sampling is not None
    end_ids = sorted(request.end_ids)
    if len(sequence.tokens) < sequence.sampling.min_tokens:
        line[end_ids] = LOWEST
    try:
        sequence.guide.mask(line, end_ids)
    except GuideError as error:
        request.failure = f"Guided decoding failed: {error}"


def _follow(request: ActiveRequest, sequence: Sequence, token: int) -> None:
    assert sequence.guide is not None
    try:
        sequence.guide.accept(token)
    except GuideError as error:
        request.failure = f"Guided decoding failed: {error}"


def accept(request: ActiveRequest, sequence: Sequence, token: int, log_prob: float) -> bool:
    """Append a chosen token. End the sequence at a stop word or at the length limit.

    Return False for an end id: the sequence ends, and the id is not appended.
    """
    if token in request.end_ids:
        sequence.finish = FinishReason.END_ID
        return False
    sequence.append(token, log_prob)
    if request.stop_words is not None and request.stop_words.match(sequence.tokens):
        sequence.finish = FinishReason.STOP_WORDS
    elif len(sequence.tokens) >= request.max_tokens:
        sequence.finish = FinishReason.LENGTH
    return True
