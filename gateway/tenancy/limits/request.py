"""What is asked of a tenant's limits, and what they say. Both counters, local and Redis, use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

LimitName = Literal["requests_per_minute", "tokens_per_minute", "concurrent_requests"]

WINDOW_S = 60
NEVER = -1
BUSY_WAIT_MS = 1000
"""Nobody knows when a running request ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitRequest:
    """What a request of `tenant` asks for; a limit of None is not counted.

    It is one of `requests` in a minute, reserves `wanted` of `tokens` in a minute, and takes
    `places` of `concurrent`.
    """

    tenant: str
    requests: int | None = None
    tokens: int | None = None
    concurrent: int | None = None
    wanted: int = 0
    places: int = 1


class Decision(NamedTuple):
    """Times are in milliseconds from now.

    `refused` names the limit that takes longest, and `wait_ms` is when the request could pass, or
    NEVER. `reset_*` is when a limit is whole again, `remaining_*` what is left of it now. `now_ms`
    is when it was counted, by the counter's clock; what is settled names seconds of that clock.
    """

    refused: LimitName | None
    wait_ms: int
    remaining_requests: int
    reset_requests_ms: int
    remaining_tokens: int
    reset_tokens_ms: int
    now_ms: int


class Settlement(NamedTuple):
    """Of the tokens counted in the second `since`, `released` count no more; `counted` do `at`.

    `places` are free again.
    """

    tenant: str
    since: int
    released: int
    at: int
    counted: int
    places: int
