"""Whether a server that leaves a look unanswered is lost, or just busy.

One that loads a model or is short of CPU answers late, so one such look says little. It says more
where tokens came all the time and have stopped with it: a server that is busy for one of both goes
on with the other. That is found in 4 seconds in place of 9, and believed only where another replica
answers: else this machine, or the network, may be what stands still, and nobody could go on.
"""

from __future__ import annotations

from collections.abc import Callable

SILENCE_S = 10.0
"""A request that timed out counts against an engine only if that has told nobody anything for so
long: a client may set a deadline that no engine could meet."""

_LOOKS = 3


class Silence:
    """Of one server. A look is `begun`, and then `broken` or `lasts`."""

    def __init__(self) -> None:
        self.replaceable: Callable[[], bool] = lambda: False
        """Whether another replica answers, that could go on with what this one has begun."""
        self._unanswered = 0
        self._heard = False
        self._flowed = False

    @property
    def suspect(self) -> bool:
        """Whether the last look was not answered."""
        return self._unanswered > 0

    def begun(self, *, heard: bool) -> None:
        """`heard` says whether anything has come of its requests since the last look began."""
        # Between two tokens there may be a look.
        self._flowed = heard or self._heard
        self._heard = heard

    def broken(self) -> None:
        """It has answered, whatever that was."""
        self._unanswered = 0

    def lasts(self, *, heard: bool) -> None:
        """Nothing was answered in time; `heard` is of the time of this look."""
        self._unanswered = 1 if self._heard or heard else self._unanswered + 1
        self._flowed = self._flowed and not heard

    @property
    def sudden(self) -> bool:
        """Whether all that came has stopped with the look that was not answered."""
        return self._flowed and self.suspect and self.replaceable()

    @property
    def lost(self) -> bool:
        """Whether it was silent for too many looks."""
        return self._unanswered >= _LOOKS
