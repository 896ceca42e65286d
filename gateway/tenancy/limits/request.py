"""What is asked of a tenant's limits, and what they say. Both counters, local and Redis, use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

LimitName = Literal["requests_per_minute", "tokens_per_minute", "concurrent_requests"]

WINDOW_S = 60
NEVER = -1
BUSY_WAIT_MS = 1000
"""Nobody knows when a running request ends."""


@dataclass(frozen=True, slots=True)
class LimitRequest:
    """One more request of `tenant`, to reserve `wanted` tokens; a limit of None is not counted."""

    tenant: str
    requests: int | None
    tokens: int | None
    concurrent: int | None
    wanted: int


class Decision(NamedTuple):
    """Times are in milliseconds from now.

    `refused` names the limit that takes longest, and `wait_ms` is when the request could pass, or
    NEVER. `reset_*` is when a limit is whole again, `remaining_*` what is left of it now. `second`
    is where the request was counted, for settling it.
    """

    refused: LimitName | None
    wait_ms: int
    remaining_requests: int
    reset_requests_ms: int
    remaining_tokens: int
    reset_tokens_ms: int
    second: int


class Settlement(NamedTuple):
    """A request has ended: `difference` is what it used less what it reserved."""

    tenant: str
    second: int
    difference: int
    concurrent: bool
