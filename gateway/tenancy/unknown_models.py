"""Requests for models that are not served, where there are no tenants who could be asked.

With tenants each has its own refusals at the console.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gateway.troubles import Troubles

LATELY_S = 300.0
"""After so long without another one it is over."""
MAX_NAME_CHARS = 100
_KIND = "unknown_models"
_TEXT = "requests name models that are not served; GET /v1/models lists those that are"


class UnknownModels:
    """Counts at no cost to a request; `step` reports. Belongs to one event loop."""

    def __init__(self, troubles: Troubles, clock: Callable[[], float] = time.monotonic) -> None:
        self._troubles = troubles
        self._clock = clock
        self._times = self._reported = 0
        self._last = ""
        self._last_at = 0.0

    def count(self, model: str) -> None:
        """Note a request whose model is not served."""
        self._times += 1
        self._last = model[:MAX_NAME_CHARS]
        self._last_at = self._clock()

    def step(self) -> None:
        """Report what was counted. To be called every second or so."""
        if self._times and self._clock() - self._last_at > LATELY_S:
            self._times = self._reported = 0
            self._troubles.clear(_KIND)
        elif self._times != self._reported:
            self._reported = self._times
            self._troubles.hold(
                _KIND, logging.WARNING, _TEXT, times=self._times, last=ascii(self._last)
            )
