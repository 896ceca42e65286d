"""Warnings for operators about LoRA adapter versions that are missing on replicas' disks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from gateway.catalog.placement import Placement, address_of

log = logging.getLogger(__name__)

# Seconds for which a problem must last before it is logged. Within this time, an agent that has
# just started sends its first report.
_LOG_AFTER_S = 15.0


def find_shortfalls(placement: Placement, disks: Mapping[str, bool]) -> list[str]:
    """Return a message for each problem with replicas' disks.

    A problem is an adapter version that a disk lacks, a replica without an agent, or an agent of an
    unknown replica. `disks` maps each replica's endpoint to True if the replica reads adapters from
    disk.
    """
    found = []
    for endpoint in sorted(endpoint for endpoint, reads in disks.items() if reads):
        if placement.addresses and address_of(endpoint) not in placement.addresses:
            found.append(f"no agent reports what {endpoint} has on its disk")
        for why, count in sorted(placement.count_lacking(endpoint).items()):
            found.append(f"{endpoint} lacks {count} adapter version(s): {why}")
    strangers = placement.addresses - {address_of(endpoint) for endpoint in disks}
    return found + [
        f"an agent keeps adapters for {address}, which is none of the replicas"
        for address in sorted(strangers)
    ]


class ShortfallLog:
    """Log of the messages of `find_shortfalls`.

    Each message is logged once, after its problem has lasted for `_LOG_AFTER_S` seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}
        self._logged: set[str] = set()

    @property
    def lasting(self) -> list[str]:
        """Messages that have been logged and whose problem still exists."""
        return sorted(self._logged)

    def update(self, found: list[str]) -> None:
        """Process `found`, the latest messages. Log those whose problem has lasted long enough."""
        now = self._clock()
        self._since = {each: self._since.get(each, now) for each in found}
        self._logged &= self._since.keys()
        for each, since in self._since.items():
            if each not in self._logged and now - since >= _LOG_AFTER_S:
                self._logged.add(each)
                log.warning("%s", each)
