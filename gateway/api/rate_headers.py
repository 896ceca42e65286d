"""OpenAI's ``x-ratelimit-*`` headers."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.errors import Quota
from gateway.tenancy.limits.limits import duration

_NAMES = {"requests_per_minute": "requests", "tokens_per_minute": "tokens"}


def rate_headers(quotas: Mapping[str, Quota]) -> dict[str, str]:
    """`quotas` are by the names of limits."""
    headers: dict[str, str] = {}
    for limit, quota in quotas.items():
        name = _NAMES[limit]
        headers[f"x-ratelimit-limit-{name}"] = str(quota.limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(quota.remaining)
        headers[f"x-ratelimit-reset-{name}"] = duration(quota.reset_ms)
    return headers
