"""Decision whether a server that misses a poll is lost, or just busy.

A server that loads a model or lacks CPU answers late, so one missed poll does not show that it is
lost. If all tokens stop at the same time, the silence is sudden: a busy server would continue to
send tokens or to answer polls. A server with a sudden silence is lost after 4 seconds instead of 9.
This applies only while another replica answers. Otherwise this machine or the network may be
stalled, and no replica could take over.

See decisions 004 and 081 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable

SILENCE_S = 10.0
"""Seconds for which an engine must have sent nothing at all before a request's timeout counts as
the engine's fault. Otherwise a client may have set a deadline that no engine could meet."""

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
        """Record that a poll begins.

        `received` is True if any request received something since the last poll began.
        """
        # Look back over two polls, because one interval may fall between two tokens.
        self._was_receiving = received or self._received
        self._received = received

    def record_answer(self) -> None:
        """Record that the server has answered the poll, even if with an error."""
        self._unanswered = 0

    def record_timeout(self, *, received: bool) -> None:
        """Record that the poll timed out.

        `received` is True if any request received something during the poll.
        """
        self._unanswered = 1 if self._received or received else self._unanswered + 1
        self._was_receiving = self._was_receiving and not received

    @property
    def is_sudden(self) -> bool:
        """Return True if all tokens stopped at the missed poll and another replica answers."""
        return self._was_receiving and self.suspect and self.replaceable()

    @property
    def is_lost(self) -> bool:
        """Return True if `_MAX_UNANSWERED_POLLS` successive polls were missed without any token."""
        return self._unanswered >= _MAX_UNANSWERED_POLLS
