"""Counts of the store, for the metrics of the process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ConversationStats:
    """Counts of one process.

    Attributes:
        bytes: Bytes of all tenants on this gateway's disk.
        records: Records of all tenants on this gateway's disk.
        evicted: Records removed early from the disk or Redis because their tenants had too many
            bytes.
        disk_failures: Failures of the disk.
        redis_failures: Failures of Redis, including the detection that it is unavailable.
        refused_values: Keys in Redis with invalid content.
    """

    bytes: int = 0
    records: int = 0
    evicted: int = 0
    disk_failures: int = 0
    redis_failures: int = 0
    refused_values: int = 0

    def count_refused(self) -> None:
        self.refused_values += 1
