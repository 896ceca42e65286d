"""What disks of replicas lack, for operators: requests for that are refused without a reason."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from gateway.catalog.placement import Placement, address_of

log = logging.getLogger(__name__)

# Agents that start, and those that are started again, have told by then.
_LONG_ENOUGH_S = 15.0


def shortfalls(placement: Placement, disks: Mapping[str, bool]) -> list[str]:
    """Sentences. `disks` says of each replica's endpoint whether it reads adapters from one now."""
    found = []
    for endpoint in sorted(endpoint for endpoint, reads in disks.items() if reads):
        if placement.addresses and address_of(endpoint) not in placement.addresses:
            found.append(f"no agent tells what {endpoint} has on its disk")
        for why, count in sorted(placement.lacking(endpoint).items()):
            found.append(f"{endpoint} lacks {count} adapter version(s): {why}")
    strangers = placement.addresses - {address_of(endpoint) for endpoint in disks}
    return found + [
        f"an agent keeps adapters for {address}, which is none of the replicas"
        for address in sorted(strangers)
    ]


class Shortfalls:
    """Logs each once, when it has been so for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    @property
    def lasting(self) -> list[str]:
        """Return the shortfalls that were logged and still hold."""
        return sorted(self._told)

    def note(self, found: list[str]) -> None:
        now = self._clock()
        self._since = {each: self._since.get(each, now) for each in found}
        self._told &= self._since.keys()
        for each, since in self._since.items():
            if each not in self._told and now - since >= _LONG_ENOUGH_S:
                self._told.add(each)
                log.warning("%s", each)
