"""OpenAI's ``x-ratelimit-*`` response headers, which show the limits and quotas of a tenant."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.config.limits import LIMITS
from gateway.errors import Quota
from gateway.tenancy.limits.limits import duration
from gateway.tenancy.limits.request import WINDOW_S


def build_rate_headers(quotas: Mapping[str, Quota]) -> dict[str, str]:
    """Return the ``x-ratelimit-*`` headers for a tenant's quotas.

    `quotas` maps the names of limits, as in `LIMITS`, to the tenant's current quotas.
    """
    headers: dict[str, str] = {}
    if not quotas:
        return headers
    for limit, kind in LIMITS.items():
        name, quota = kind.header, quotas.get(limit)
        if name is None or quota is None:
            continue
        headers[f"x-ratelimit-limit-{name}"] = str(quota.limit)
        headers[f"x-ratelimit-remaining-{name}"] = str(quota.remaining)
        # Show at most `WINDOW_S` seconds, the period of the limits. Limits are counted in full
        # seconds, so `reset_ms` may be up to a second longer than the period.
        headers[f"x-ratelimit-reset-{name}"] = duration(min(quota.reset_ms, WINDOW_S * 1000))
    return headers
