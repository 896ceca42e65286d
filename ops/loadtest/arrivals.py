"""Times at which a load test sends its requests."""

from __future__ import annotations

import random
from typing import Literal

Arrivals = Literal["constant", "exponential_dist"]


def send_times(count: int, rate: float, arrivals: Arrivals, rng: random.Random) -> list[float]:
    """Return the send times of `count` requests, ascending, in seconds from the start.

    Args:
        count: number of requests.
        rate: requests per second, on average; -1 sends all at once.
        arrivals: distribution of the time between requests; exponential gaps form a Poisson
            process.
        rng: source of random numbers.

    Raises ValueError if `rate` is neither -1 nor positive.
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
