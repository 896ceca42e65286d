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

_MAX_UNANSWERED_POLLS = 3


class Silence:
    """Of one server. A look is `begun`, and then `broken` or `lasts`."""

    def __init__(self) -> None:
        self.replaceable: Callable[[], bool] = lambda: False
        """Whether another replica answers, that could go on with what this one has begun."""
        self._unanswered = 0
        self._received = False
        self._was_receiving = False

    @property
    def suspect(self) -> bool:
        """Whether the last look was not answered."""
        return self._unanswered > 0

    def begin_poll(self, *, received: bool) -> None:
        """`heard` says whether anything has come of its requests since the last look began."""
        # Between two tokens there may be a look.
        self._was_receiving = received or self._received
        self._received = received

    def record_answer(self) -> None:
        """It has answered, whatever that was."""
        self._unanswered = 0

    def record_timeout(self, *, received: bool) -> None:
        """Nothing was answered in time; `heard` is of the time of this look."""
        self._unanswered = 1 if self._received or received else self._unanswered + 1
        self._was_receiving = self._was_receiving and not received

    @property
    def is_sudden(self) -> bool:
        """Whether all that came has stopped with the look that was not answered."""
        return self._was_receiving and self.suspect and self.replaceable()

    @property
    def is_lost(self) -> bool:
        """Whether it was silent for too many looks."""
        return self._unanswered >= _MAX_UNANSWERED_POLLS
