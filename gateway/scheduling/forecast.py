"""Forecast of how long a request will wait for a slot, calculated from recent requests.

Each tenant has its own statistics, because tenants get slots by fair scheduling: long requests of
one tenant hardly delay the requests of another tenant.

See decision 076 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

# Averages are mostly determined by this number of recent samples. Older samples have little weight.
_WINDOW_SAMPLES = 16
_DECAY = 1 - 1 / _WINDOW_SAMPLES
# Minimum number of samples for a forecast that is based only on the tenant's own requests. Also the
# number of requests of a tenant that may wait without a forecast while it has fewer samples.
MIN_SAMPLES = 8
# Assumed seconds for which a request of a new tenant holds its slot. The weight of this assumption
# falls to zero while the tenant releases its first `MIN_SAMPLES` slots. Without the assumption, all
# requests of a burst after the gateway's start would be queued, and most of them would be refused
# only after a long wait.
_ASSUMED_S = 2.0
# A first token is late if it takes longer than the mean time plus this number of mean deviations.
# Only 1 or 2 % of all first tokens are late.
_LATE_DEVIATIONS = 3.0


@dataclass(slots=True)
class Pace:
    """Recent speed of one tenant: its release rate, and its time from a grant to the first token.

    The release rate is the number of released slots, divided by the total seconds for which slots
    were in use. The rate does not depend on the number of slots in use, or on bursts of requests.
    The seconds include the slots of running answers, so long answers lower the rate while they run.
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
        """Count `more` slots as in use. A negative number releases slots.

        `now` is the time in seconds. All calls must use the same clock.
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
        """True if enough slots were released for a forecast without an assumption."""
        return self._releases >= MIN_SAMPLES

    def freed_per_s(self, taken: int, now: float) -> float:
        """Return how many of `taken` slots are expected to be released per second.

        The estimate counts one more release than was recorded. The result is therefore more often
        too high than too low.
        """
        taken_s = self._in_use_s + self._in_use * (now - self._since)
        taken_s += _ASSUMED_S * max(0.0, 1 - self._releases / MIN_SAMPLES)
        return taken * (self._released_slots + 1) / max(taken_s, 1e-6)

    def record_first_token(self, seconds: float) -> None:
        """Record that a request got its first token `seconds` after its slot was granted."""
        self._first_tokens += 1
        weight = 1 / min(self._first_tokens, _WINDOW_SAMPLES)
        error = seconds - self._mean_s
        self._mean_s += weight * error
        self._deviation_s += weight * (abs(error) - self._deviation_s)

    @property
    def first_token_s(self) -> float:
        """Seconds within which about 98 % of first tokens follow a slot's grant; 0.0 if unknown."""
        if self._first_tokens < MIN_SAMPLES:
            return 0.0
        return self._mean_s + _LATE_DEVIATIONS * self._deviation_s


class Standing(NamedTuple):
    """Data of one tenant from which `expected_wait_s` calculates a forecast.

    Attributes:
        priority: the tenant's priority; a greater number is served first.
        in_use: number of slots that the tenant has in use.
        waiting: number of queued generations of the tenant.
        freed_per_s: number of the tenant's slots that are expected to be released per second.
    """

    priority: int
    in_use: int
    waiting: int
    freed_per_s: float


def expected_wait_s(mine: Standing, others: Collection[Standing], needed: int) -> float | None:
    """Return the median time in seconds until `mine` gets `needed` more slots.

    Return None if no slots are being released. The calculation follows the rules of `FairPool`. If
    tenants of a higher priority wait, all released slots go to them first. Otherwise, `mine` gets
    all slots that its own requests release, and a part of the slots that these tenants release:

    - tenants with a lower priority;
    - tenants with more slots than `mine`, until `mine` has the same number of slots.

    `mine` shares these tenants' slots equally with its rivals. A rival is a waiting tenant of the
    same priority that does not have more slots than `mine`.

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
