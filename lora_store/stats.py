"""Statistics that the adapter store collects and the gateway exports as metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StoreStats:
    """Statistics of one adapter store: counters that only grow, and current values.

    The fields are updated on the event loop, so they need no lock. One exception is harmless: a
    thread may set `redis_up` to False.
    """

    memory_hits: int = 0
    memory_misses: int = 0
    disk_hits: int = 0
    disk_misses: int = 0
    redis_hits: int = 0
    redis_misses: int = 0
    redis_errors: int = 0
    corrupt_copies: int = 0
    refused_values: int = 0
    refilled: int = 0
    notices: int = 0
    syncs: int = 0
    # Current values, which may also decrease.
    redis_up: bool = False
    memory_bytes: int = 0
    unsent: int = 0
    unwritten: int = 0
