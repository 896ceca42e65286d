"""Numbers that the store counts and the gateway exports. All but the states only grow."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StoreStats:
    """Counters and states. Written on the event loop only, so plain integers suffice."""

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
