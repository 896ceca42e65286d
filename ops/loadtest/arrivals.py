"""Send times of requests."""

from __future__ import annotations

import random
from typing import Literal

Arrivals = Literal["constant", "exponential_dist"]


def send_times(count: int, rate: float, arrivals: Arrivals, rng: random.Random) -> list[float]:
    """Return the seconds from the start at which each of `count` requests is due, ascending.

    `rate` is in requests per second, -1 for all at once. Exponential gaps make a Poisson process.
    Raises ValueError for any other rate that is not positive.
    """
    if rate == -1:
        return [0.0] * count
    if not rate > 0:
        raise ValueError(f"--request-rate: found {rate:g}, allowed -1 or above 0")
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate) if arrivals == "exponential_dist" else 1 / rate
    return times
