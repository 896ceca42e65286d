"""Statistics that the store collects and the gateway exports as metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StoreStats:
    """Counters, which only grow, and current states.

    The counters are written on the event loop, so plain integers suffice.
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
    # States.
    redis_up: bool = False
    memory_bytes: int = 0
    unsent: int = 0
    unwritten: int = 0
