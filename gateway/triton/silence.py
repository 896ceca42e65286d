"""Decision whether a server that misses a poll is lost, or just busy.

A server that loads a model or lacks CPU answers late, so one missed poll means little. It means
more if tokens came all the time and stopped with it: a busy server continues at least one of both.
That is detected in 4 seconds instead of 9. It counts only if another replica answers: otherwise
this machine or the network may be stalled, and no replica could take over.

See decisions 004 and 081 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable

SILENCE_S = 10.0
"""A request that timed out counts against an engine only if the engine has sent nothing at all for
this long: a client may set a deadline that no engine could meet."""

_MAX_UNANSWERED_POLLS = 3


class Silence:
    """The missed polls of one server. Each `begin_poll` is followed by `record_answer` or
    `record_timeout`."""

    def __init__(self) -> None:
        self.replaceable: Callable[[], bool] = lambda: False
        """Callback: returns True if another replica answers and could resume the requests."""
        self._unanswered = 0
        self._received = False
        self._was_receiving = False

    @property
    def suspect(self) -> bool:
        """Return True if the last poll was not answered."""
        return self._unanswered > 0

    def begin_poll(self, *, received: bool) -> None:
        """Begin a poll. `received` is True if any request received something since the last poll
        began."""
        # A poll may fall between two tokens.
        self._was_receiving = received or self._received
        self._received = received

    def record_answer(self) -> None:
        """Record that the server has answered, with whatever result."""
        self._unanswered = 0

    def record_timeout(self, *, received: bool) -> None:
        """Record that the poll timed out; `received` covers the time of this poll."""
        self._unanswered = 1 if self._received or received else self._unanswered + 1
        self._was_receiving = self._was_receiving and not received

    @property
    def is_sudden(self) -> bool:
        """Return True if all tokens stopped together with the missed poll."""
        return self._was_receiving and self.suspect and self.replaceable()

    @property
    def is_lost(self) -> bool:
        """Return True if too many polls were missed."""
        return self._unanswered >= _MAX_UNANSWERED_POLLS
