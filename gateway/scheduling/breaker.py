"""Circuit breaker, which stops requests to a replica for some seconds after repeated failures."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

_FAILURES_TO_OPEN = 3
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 30.0


class Breaker:
    """Circuit breaker of a replica: opens after three failures in a row.

    After a pause, an open breaker admits a single request as a probe. A successful probe closes the
    breaker. A failed probe doubles the pause, up to 30 s. A broken connection fails many requests
    at once but counts as one failure: the breaker ignores the failure of a request that was sent
    before the last counted failure.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._failed_at = -math.inf
        self._pause_s = _FIRST_PAUSE_S
        self._open_until: float | None = None
        self._probing = False

    @property
    def is_open(self) -> bool:
        """True from the third failure in a row until a request succeeds."""
        return self._open_until is not None

    @property
    def allows(self) -> bool:
        """True if a request may be sent now."""
        if self._open_until is None:
            return True
        return not self._probing and self._clock() >= self._open_until

    def begin(self) -> bool:
        """Record that a request is sent. Return True if the request is a probe.

        The caller must report the outcome of a probe with one of the `record_` methods. Until then
        the breaker admits no other request.
        """
        self._probing = self._open_until is not None
        return self._probing

    def record_success(self) -> None:
        """Record that a request succeeded, and close the breaker."""
        self._failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._open_until = None
        self._probing = False

    def record_failure(self, began: float, *, probe: bool) -> None:
        """Record that a request failed.

        Args:
            began: time when the request was sent, in seconds of the breaker's clock.
            probe: the return value of `begin` for this request.
        """
        now = self._clock()
        if self._open_until is not None:
            if not probe:
                return  # the request was sent before the breaker opened; only probes count now
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        else:
            if began <= self._failed_at:
                return
            self._failed_at = now
            self._failures += 1
            if self._failures < _FAILURES_TO_OPEN:
                return
        self._open_until = now + self._pause_s
        self._probing = False

    def record_unknown(self, *, probe: bool) -> None:
        """Record that a request ended, but neither proved nor disproved that the replica works."""
        if probe:
            self._probing = False
