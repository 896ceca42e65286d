"""Measurements of single requests and of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["core", "e2e", "chat"]


@dataclass(slots=True)
class Sample:
    """A request. Times in seconds from the start of the run, None for an event that did not happen.

    `first` is the first token and `last` the last one; both only for streamed answers.
    `input_tokens` and `output_tokens` are counted, not the requested numbers.
    """

    number: int
    began: float
    ended: float = 0.0
    first: float | None = None
    last: float | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def latency(self) -> float:
        """Seconds from sending to the end of the answer."""
        return self.ended - self.began

    @property
    def first_token(self) -> float | None:
        return None if self.first is None else self.first - self.began

    @property
    def between_tokens(self) -> float | None:
        """Mean seconds between tokens; a response with several tokens counts as several."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    def record_token(self, now: float) -> None:
        if self.first is None:
            self.first = now
        self.last = now


@dataclass(frozen=True)
class BenchRun:
    """A mode at one level; `concurrency` None is no limit, `what` describes how it was sent."""

    mode: Mode
    what: str
    concurrency: int | None
    samples: list[Sample]

    @property
    def good(self) -> list[Sample]:
        return [sample for sample in self.samples if not sample.error]

    @property
    def failed(self) -> int:
        return sum(bool(sample.error) for sample in self.samples)

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first request to the end of the last successful answer."""
        if not self.good:
            return 0.0
        return max(s.ended for s in self.good) - min(s.began for s in self.good)


def append(samples: list[Sample], new: Sequence[Sample]) -> None:
    """Append the samples of a later part, shifted to start when the last of `samples` ended."""
    pause, count = max((s.ended for s in samples), default=0.0), len(samples)
    for sample in new:
        sample.number += count
        sample.began += pause
        sample.ended += pause
        sample.first = None if sample.first is None else sample.first + pause
        sample.last = None if sample.last is None else sample.last + pause
    samples += new


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value at position ceil(n * part) of the sorted `values`; nan if empty.

    Without interpolation, like benchmark_core_model.py.
    """
    ordered = sorted(values)
    # Rounded first: 100 * 0.29 is 28.999999999999996.
    return ordered[math.ceil(round(len(ordered) * part, 9)) - 1] if ordered else math.nan
