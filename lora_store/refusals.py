"""Counting and logging of invalid values in Redis."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_LOG = logging.getLogger(__name__)

_REMEMBERED = 1024


class RefusedValues:
    """Counter and log of Redis keys with invalid values.

    When a key is found with an invalid value for the first time, it is counted and logged, and
    `on_new` is called. Methods may be called from any thread.
    """

    def __init__(self, on_new: Callable[[], object] = lambda: None) -> None:
        self._on_new = on_new
        self._lock = threading.Lock()
        self._logged: dict[str, None] = {}
        self.count = 0

    def add(self, key: str, reason: object) -> None:
        with self._lock:
            if key in self._logged:
                return
            if len(self._logged) == _REMEMBERED:
                del self._logged[next(iter(self._logged))]
            self._logged[key] = None
            self.count += 1
        self._on_new()
        _LOG.error("left alone in Redis: %.200r: %.200s", key, reason)
