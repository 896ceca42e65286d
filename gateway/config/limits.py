"""Table of the limits that a tenant may have, with the unit and the period of each limit.

To add a limit, add a row to `LIMITS`, a field of `RedisUnavailablePolicies`, and a field of
`Tenant`.

See decision 093 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

LimitName = Literal[
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "tokens_per_day",
    "tokens_per_month",
]
Counted = Literal["requests", "tokens", "slots"]
"""Unit that a limit counts. Each running choice or beam of each prompt takes one slot.

A running request that generates no text takes one slot, too.
"""


class LimitKind(NamedTuple):
    """Unit and period of a limit.

    Attributes:
        code: letter that identifies the limit in Redis. The names of its hash fields begin with
            this letter, and `script.lua` derives the limit's period from it.
        counts: unit that the limit counts.
        budget: True if the period is a calendar day or month in UTC. Other limits apply to the last
            minute, or to the requests that run now.
        header: name of the limit in OpenAI's headers ``x-ratelimit-*``; None without headers.
    """

    code: str
    counts: Counted
    budget: bool = False
    header: str | None = None


LIMITS: Mapping[LimitName, LimitKind] = {
    "requests_per_minute": LimitKind("r", "requests", header="requests"),
    "tokens_per_minute": LimitKind("t", "tokens", header="tokens"),
    "concurrent_requests": LimitKind("c", "slots"),
    "tokens_per_day": LimitKind("d", "tokens", budget=True),
    "tokens_per_month": LimitKind("m", "tokens", budget=True),
}

RedisUnavailablePolicy = Literal["local", "allow", "refuse"]
BudgetPolicy = Literal["allow", "refuse"]


class RedisUnavailablePolicies(BaseModel):
    """Policy for each limit while Redis cannot count it for all gateways together.

    ``local``: each gateway process counts its own requests only. ``allow``: the limit does not
    apply; tokens that are used meanwhile are added to the budgets once Redis is available again.
    ``refuse``: requests of tenants that have this limit get status 503.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    requests_per_minute: RedisUnavailablePolicy = Field(
        default="local", description="Policy for requests within 60 seconds."
    )
    tokens_per_minute: RedisUnavailablePolicy = Field(
        default="local", description="Policy for tokens within 60 seconds."
    )
    concurrent_requests: RedisUnavailablePolicy = Field(
        default="local", description="Policy for requests that run at once."
    )
    tokens_per_day: BudgetPolicy = Field(
        default="allow",
        description="Policy for the budget of a day. A budget known to be used up is refused.",
    )
    tokens_per_month: BudgetPolicy = Field(
        default="allow",
        description="Policy for the budget of a month. A budget known to be used up is refused.",
    )
