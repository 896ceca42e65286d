"""Delay between a server's death and its restart, which doubles with each death."""

from __future__ import annotations

import time

FIRST_DELAY = 0.2  # seconds
LONGEST_DELAY = 10.0
SETTLED_AFTER = 30.0  # seconds of running after which the delay is `FIRST_DELAY` again


class Backoff:
    """Restart delay of one server, which doubles with each death up to `LONGEST_DELAY`.

    After a run of more than `SETTLED_AFTER` seconds, the delay is `FIRST_DELAY` again.
    """

    def __init__(self) -> None:
        self._deaths = 0
        self._started = time.monotonic()
        self._due: float | None = None

    def record_death(self) -> float | None:
        """Record that the server has died. Return the delay before its restart, in seconds.

        Further calls for the same death return None.
        """
        if self._due is not None:
            return None
        now = time.monotonic()
        if now - self._started > SETTLED_AFTER:
            self._deaths = 0
        delay: float = min(FIRST_DELAY * 2**self._deaths, LONGEST_DELAY)
        self._deaths += 1
        self._due = now + delay
        return delay

    def is_due(self) -> bool:
        return self._due is not None and time.monotonic() >= self._due

    def record_start(self) -> None:
        self._started = time.monotonic()
        self._due = None
