"""How long a request will wait for its turn, from what was seen of those before it.

Tenants take turns, so each is known by itself: what one does changes another's forecast no more
than its turn.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

# What came earlier than about so many counts little.
_REMEMBERED = 16
_KEPT = 1 - 1 / _REMEMBERED
# Of fewer nothing is known: nobody is refused for the first of a tenant's requests.
_ENOUGH = 8
# Mean absolute deviations that a first token may be late by: of a hundred, one or two are later.
_DEVIATIONS = 3.0


@dataclass(slots=True)
class Pace:
    """How soon one tenant's places come free, and how soon its first tokens come behind that.

    The rate is that of places freed to seconds for which one was taken. So it is no matter how many
    are taken, or that all came at once, and long answers count while they run and not at their end.
    """

    _frees: int = 0
    _freed: float = 0.0
    _taken: int = 0
    _taken_s: float = 0.0
    _since: float = 0.0
    _firsts: int = 0
    _mean_s: float = 0.0
    _deviation_s: float = 0.0

    def changes(self, more: int, now: float) -> None:
        """So many places are taken more; below 0, come free. `now` is of any clock, in seconds."""
        self._taken_s += self._taken * (now - self._since)
        self._since = now
        self._taken += more
        if more < 0:
            self._frees += 1
            self._freed = _KEPT * (self._freed - more)
            self._taken_s *= _KEPT

    @property
    def known(self) -> bool:
        return self._frees >= _ENOUGH

    def freed_per_s(self, taken: int, now: float) -> float:
        """Of so many of the places that are taken, rather too many than too few: as if one came
        free at this moment."""
        taken_s = self._taken_s + self._taken * (now - self._since)
        return taken * (self._freed + 1) / max(taken_s, 1e-6)

    def answered(self, seconds: float) -> None:
        """A first token came so long after its place."""
        self._firsts += 1
        weight = 1 / min(self._firsts, _REMEMBERED)
        error = seconds - self._mean_s
        self._mean_s += weight * error
        self._deviation_s += weight * (abs(error) - self._deviation_s)

    @property
    def first_token_s(self) -> float:
        """In which nearly all first tokens come; 0 while that is not known."""
        if self._firsts < _ENOUGH:
            return 0.0
        return self._mean_s + _DEVIATIONS * self._deviation_s


class Standing(NamedTuple):
    """A tenant where places are short: how many it has and wants, and has coming free each
    second."""

    priority: int
    taken: int
    waiting: int
    freed_per_s: float


def expected_wait_s(mine: Standing, others: Collection[Standing], needed: int) -> float | None:
    """Seconds in which, as likely as not, `mine` gets so many more places; None where nothing
    comes free.

    As `Admission` hands them out: first to the higher priority, then to who has fewest. A tenant
    that waits gets its own again, and those of who has more until both have as many, in turn with
    others that have as few.
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
            elif each.taken > mine.taken:
                gained += each.freed_per_s * min(1.0, (each.taken - mine.taken) / needed)
            elif each.waiting and each.priority == mine.priority:
                rivals += 1
        per_s = mine.freed_per_s + gained / rivals
    # The median, where the mean is one place after the other.
    return (ahead + needed - 1 / 3) / per_s if per_s else None
