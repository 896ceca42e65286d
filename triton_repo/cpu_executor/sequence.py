"""A sequence of a request, and the interface of the beam search."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from triton_repo.cpu_executor.enums import FinishReason
from triton_repo.cpu_executor.guide import GuideState
from triton_repo.cpu_executor.kv_cache import SequenceCache
from triton_repo.cpu_executor.sampling import SamplingState

NOT_FINISHED = FinishReason.NOT_FINISHED


@dataclass(slots=True, eq=False)
class Sequence:
    """A single sample or beam of a request, with its generated tokens.

    ``reported_tokens`` is the number of ``tokens`` that earlier responses had. ``reported_end`` is
    True if the last response of the sequence was built.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    cum_log_prob: float = 0.0
    finish: FinishReason = NOT_FINISHED
    logits: list[NDArray[np.float32]] = field(default_factory=list)
    cache: SequenceCache | None = None
    sampling: SamplingState | None = None
    guide: GuideState | None = None
    reported_tokens: int = 0
    reported_end: bool = False

    def append(self, token: int, log_prob: float) -> None:
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.cum_log_prob += log_prob


class Beams(Protocol):
    """Interface of the beam search of one request."""

    def step(self, live: Seq[Sequence], logits: NDArray[np.float32]) -> None:
        """Continue each live beam by one token. ``logits`` is ``[live, vocab]`` and is modified."""
