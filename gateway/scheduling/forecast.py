"""Forecast of how long a request will wait for its slot, from recent requests.

Tenants share slots fairly, so each tenant has its own statistics: another tenant's requests change
the forecast only by their fair share.

See decision 076 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

# Number of recent samples that determine a statistic. Older samples have little weight.
_WINDOW_SAMPLES = 16
_DECAY = 1 - 1 / _WINDOW_SAMPLES
# Minimum number of samples for a forecast. A tenant's first requests are therefore never refused
# because of a forecast.
_MIN_SAMPLES = 8
# Nearly all first tokens come within the mean time plus this many mean deviations. One or two in a
# hundred come later.
_LATE_DEVIATIONS = 3.0


@dataclass(slots=True)
class Pace:
    """Recent speed of one tenant: its release rate, and its time from a grant to the first token.

    The release rate is the number of released slots, divided by the time for which slots were in
    use, summed over the slots. It therefore depends neither on how many slots are in use nor on
    whether requests came all at once. Slots of running answers count in the divisor, so long
    answers lower the rate while they run.
    """

    _releases: int = 0
    _released_slots: float = 0.0
    _in_use: int = 0
    _in_use_s: float = 0.0
    _since: float = 0.0
    _first_tokens: int = 0
    _mean_s: float = 0.0
    _deviation_s: float = 0.0

    def change_slots(self, more: int, now: float) -> None:
        """Count `more` slots as in use; a negative number releases them.

        `now` is in seconds, by any one clock.
        """
        self._in_use_s += self._in_use * (now - self._since)
        self._since = now
        self._in_use += more
        if more < 0:
            self._releases += 1
            self._released_slots = _DECAY * (self._released_slots - more)
            self._in_use_s *= _DECAY

    @property
    def is_known(self) -> bool:
        """True if enough slots were released for a forecast."""
        return self._releases >= _MIN_SAMPLES

    def freed_per_s(self, taken: int, now: float) -> float:
        """Return how many of `taken` slots are released per second.

        The result is too high rather than too low, because one more release is counted as if it
        came now.
        """
        taken_s = self._in_use_s + self._in_use * (now - self._since)
        return taken * (self._released_slots + 1) / max(taken_s, 1e-6)

    def record_first_token(self, seconds: float) -> None:
        """Record that a first token came `seconds` after its slot was granted."""
        self._first_tokens += 1
        weight = 1 / min(self._first_tokens, _WINDOW_SAMPLES)
        error = seconds - self._mean_s
        self._mean_s += weight * error
        self._deviation_s += weight * (abs(error) - self._deviation_s)

    @property
    def first_token_s(self) -> float:
        """Seconds from a grant within which nearly all first tokens come; 0 while unknown."""
        if self._first_tokens < _MIN_SAMPLES:
            return 0.0
        return self._mean_s + _LATE_DEVIATIONS * self._deviation_s


class Standing(NamedTuple):
    """A tenant in the competition for slots: its slots in use, its queue, and its release rate."""

    priority: int
    in_use: int
    waiting: int
    freed_per_s: float


def expected_wait_s(mine: Standing, others: Collection[Standing], needed: int) -> float | None:
    """Return the median time in seconds until `mine` gets `needed` more slots.

    Return None if no slots are being released. The calculation follows `FairPool`: free slots go to
    the highest priority first, then to the tenant with the fewest slots. `mine` therefore gets its
    own released slots again. It also gets slots of tenants with more slots until it has as many as
    they have, and all slots of tenants with a lower priority. `mine` shares these with other
    waiting tenants of its priority that do not have more slots.

    Args:
        mine: the tenant that waits.
        others: all other tenants.
        needed: number of slots that `mine` waits for.
    """
    ahead = sum([each.waiting for each in others if each.priority > mine.priority])
    if ahead:
        per_s = mine.freed_per_s + sum([each.freed_per_s for each in others])
    else:
        rivals = 1
        gained = 0.0
        for each in others:
            if each.priority < mine.priority:
                gained += each.freed_per_s
            elif each.in_use > mine.in_use:
                gained += each.freed_per_s * min(1.0, (each.in_use - mine.in_use) / needed)
            elif each.waiting and each.priority == mine.priority:
                rivals += 1
        per_s = mine.freed_per_s + gained / rivals
    # The wait for n slots is a sum of n exponential times (an Erlang distribution). Its mean is
    # n / rate, its median about (n - 1/3) / rate.
    return (ahead + needed - 1 / 3) / per_s if per_s else None
