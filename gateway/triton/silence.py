"""Detection of lost servers by their missed polls.

A server that does not answer a poll may be lost. It may also be busy: a server that loads a model
or lacks CPU time answers late. So one missed poll does not mean that the server is lost. A server
usually counts as lost after 9 seconds without answers and without tokens.

A silence is "sudden" if the server sent tokens just before a poll, but sends none during the poll
and does not answer it. A busy server would still send tokens or answer polls, so a suddenly silent
server counts as lost after 4 seconds. This rule applies only while another replica answers. If no
replica answers, this machine or the network may be the cause, and no replica could take over the
requests.

See decisions 004 and 081 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable

SILENCE_S = 10.0
"""Seconds without any response after which the engine is blamed for a request's timeout.

If any request has got a response more recently, the timeout may have another cause: a client may
set a deadline that no engine can meet.
"""

_MAX_UNANSWERED_POLLS = 3


class Silence:
    """Record of the missed polls of one server.

    After each `begin_poll`, call either `record_answer` or `record_timeout`."""

    def __init__(self) -> None:
        self.replaceable: Callable[[], bool] = lambda: False
        """Callback that returns True if another replica answers and could resume the requests."""
        self._unanswered = 0
        self._received = False
        self._was_receiving = False

    @property
    def suspect(self) -> bool:
        """True if the last poll was not answered."""
        return self._unanswered > 0

    def begin_poll(self, *, received: bool) -> None:
        """Record that a poll starts.

        `received` is True if any request got a response since the start of the last poll.
        """
        # Look at the last two intervals between polls, because a working server may send no token
        # in a single interval.
        self._was_receiving = received or self._received
        self._received = received

    def record_answer(self) -> None:
        """Record that the server has answered the poll. An error is an answer, too."""
        self._unanswered = 0

    def record_timeout(self, *, received: bool) -> None:
        """Record that the poll timed out.

        `received` is True if any request got a response during the poll.
        """
        self._unanswered = 1 if self._received or received else self._unanswered + 1
        self._was_receiving = self._was_receiving and not received

    @property
    def is_sudden(self) -> bool:
        """True if the silence is "sudden" (see the module), and `replaceable` returns True."""
        return self._was_receiving and self.suspect and self.replaceable()

    @property
    def is_lost(self) -> bool:
        """True if `_MAX_UNANSWERED_POLLS` consecutive polls got neither an answer nor a token."""
        return self._unanswered >= _MAX_UNANSWERED_POLLS
