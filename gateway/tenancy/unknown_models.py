"""Warning for the operator about requests for unknown models, on a gateway without tenants.

The warning is an entry in `Troubles`, the list of current problems. On a gateway with tenants, the
console shows the refused requests of each tenant instead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from gateway.troubles import Troubles

FORGET_AFTER_S = 300.0
"""Seconds after the last request for an unknown model until the warning is cleared."""
MAX_NAME_CHARS = 100
_KIND = "unknown_models"
_TEXT = "requests name models that are not served; GET /v1/models lists those that are"


class UnknownModels:
    """Counter of requests for unknown models. `step` reports the count to `troubles`.

    Not thread-safe: use an instance in one event loop only.
    """

    def __init__(self, troubles: Troubles, clock: Callable[[], float] = time.monotonic) -> None:
        self._troubles = troubles
        self._clock = clock
        self._times = self._reported = 0
        self._last = ""
        self._last_at = 0.0

    def count(self, model: str) -> None:
        """Count a request for an unknown model."""
        self._times += 1
        self._last = model[:MAX_NAME_CHARS]
        self._last_at = self._clock()

    def step(self) -> None:
        """Report a changed count, or clear an old warning. Call this about every second."""
        if self._times and self._clock() - self._last_at > FORGET_AFTER_S:
            self._times = self._reported = 0
            self._troubles.clear(_KIND)
        elif self._times != self._reported:
            self._reported = self._times
            self._troubles.hold(
                _KIND, logging.WARNING, _TEXT, times=self._times, last=ascii(self._last)
            )
