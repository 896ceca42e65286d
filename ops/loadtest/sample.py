"""Measurements of single requests and of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mode = Literal["core", "e2e", "chat"]


@dataclass(slots=True)
class Sample:
    """The measurement of a request. Times are in seconds from the start of the run.

    Attributes:
        number: position of the request in the run.
        began: time at which the request was sent.
        ended: time at which the answer was complete.
        first: time of the first token; None without a streamed answer.
        last: time of the last token so far; None without a streamed answer.
        input_tokens: number of prompt tokens.
        output_tokens: number of generated tokens.
        error: the error message of a failed request, else "".
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
        """Mean seconds between generated tokens; None if not streamed or fewer than two tokens."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    def record_token(self, now: float) -> None:
        if self.first is None:
            self.first = now
        self.last = now


@dataclass(frozen=True)
class BenchRun:
    """The measurements of all requests that were sent to one target at one concurrency.

    Attributes:
        mode: the target: `core`, `e2e` or `chat`.
        what: description of the target's server and of the format of the requests.
        concurrency: maximum number of requests at a time; None is no limit.
        samples: the measurement of each request.
    """

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
    """Append the samples `new` of a later slice of the same run to `samples`.

    The numbers and times in `new` start at 0. The function adds the number of earlier samples to
    the numbers, and the end of the last earlier answer to the times.
    """
    pause, count = max((s.ended for s in samples), default=0.0), len(samples)
    for sample in new:
        sample.number += count
        sample.began += pause
        sample.ended += pause
        sample.first = None if sample.first is None else sample.first + pause
        sample.last = None if sample.last is None else sample.last + pause
    samples += new


def percentile(values: Sequence[float], part: float) -> float:
    """Return the percentile `part` (0 to 1) of `values`; nan if there are no values.

    The result is the value at position ceil(n * part) of the sorted values, counted from 1, without
    interpolation, as in benchmark_core_model.py.
    """
    ordered = sorted(values)
    # Round before ceil: 100 * 0.07 is 7.000000000000001, which ceil alone would make 8.
    return ordered[math.ceil(round(len(ordered) * part, 9)) - 1] if ordered else math.nan
