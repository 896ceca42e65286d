"""Statistics of the store of conversations, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ConversationStats:
    """Statistics of one process.

    Attributes:
        bytes: Bytes of all tenants' records on this gateway's disk.
        records: Number of all tenants' records on this gateway's disk.
        evicted: Number of records that were removed from the disk or Redis before they expired,
            because their tenant's records had too many bytes.
        disk_failures: Number of calls that failed because of the disk.
        redis_failures: Number of calls that failed because of Redis, including polls.
        refused_values: Number of keys in Redis with invalid values.
    """

    bytes: int = 0
    records: int = 0
    evicted: int = 0
    disk_failures: int = 0
    redis_failures: int = 0
    refused_values: int = 0

    def count_refused(self) -> None:
        self.refused_values += 1
