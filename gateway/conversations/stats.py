"""Counts of the store, for the metrics of the process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ConversationStats:
    """
    Attributes:
        bytes: what all tenants have on this gateway's disk.
        records: those of it.
        evicted: records that were removed from the disk or Redis before their time, as their
            tenants had too many bytes.
        disk_failures: times that the disk failed.
        redis_failures: times that Redis failed, or was found away.
        refused_values: places in Redis whose content does not fit.
    """

    bytes: int = 0
    records: int = 0
    evicted: int = 0
    disk_failures: int = 0
    redis_failures: int = 0
    refused_values: int = 0

    def count_refused(self) -> None:
        self.refused_values += 1
