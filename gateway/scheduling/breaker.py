"""Health by outcome: a replica that fails what it is given gets nothing for a while."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_FAILURES = 3
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class Breaker:
    """Open after three failures in a row; then one probe at a time is let through.

    A probe that succeeds closes it, one that fails doubles the pause, up to 30 s. What had begun
    before a failure does not count again: a connection that breaks fails all that was on it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._failed_at = -math.inf
        self._pause_s = _FIRST_PAUSE_S
        self._open_until: float | None = None
        self._probing = False

    @property
    def open(self) -> bool:
        return self._open_until is not None

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        if self._open_until is None:
            return True
        return not self._probing and self._clock() >= self._open_until

    def begin(self) -> bool:
        """A request is sent; whether it is a probe, whose outcome must be told."""
        self._probing = self._open_until is not None
        return self._probing

    def succeeded(self) -> None:
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._open_until = None
        self._probing = False

    def failed(self, began: float, *, probe: bool) -> None:
        """`began` is when the request was sent, by the clock."""
        now = self._clock()
        if self._open_until is not None:
            if not probe:
                return  # it was sent before; only a probe says how things are now
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        else:
            if began <= self._failed_at:
                return
            self._failed_at = now
            self._failures += 1
            if self._failures < _FAILURES:
                return
        self._open_until = now + self._pause_s
        self._probing = False

    def undecided(self, *, probe: bool) -> None:
        """The request ended without saying anything of the replica's health."""
        if probe:
            self._probing = False
