"""What lies in Redis and does not fit: counted, and told of once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

_REMEMBERED = 1024


class Refusals:
    """Counts the places whose content did not fit, and logs each of them once. For any thread.

    `on_new` is called for each.
    """

    def __init__(self, on_new: Callable[[], object] = lambda: None) -> None:
        self._on_new = on_new
        self._lock = threading.Lock()
        self._told: dict[str, None] = {}
        self.count = 0

    def add(self, place: str, reason: object) -> None:
        with self._lock:
            if place in self._told:
                return
            if len(self._told) == _REMEMBERED:
                del self._told[next(iter(self._told))]
            self._told[place] = None
            self.count += 1
        self._on_new()
        _LOG.error("left alone in Redis: %.200r: %.200s", place, reason)
