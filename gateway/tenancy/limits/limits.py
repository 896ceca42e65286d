"""A tenant's limits around one request: reserve before it starts, settle when it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gateway.config.file import Configuration, RedisUnavailablePolicy
from gateway.config.tenants import Tenant
from gateway.errors import LimitsUnavailable, Quota, RateLimited
from gateway.tenancy.limits.local import LocalLimits
from gateway.tenancy.limits.redis import SharedLimits
from gateway.tenancy.limits.request import NEVER, Decision, LimitName, LimitRequest, Settlement

_WORDS: dict[LimitName, str] = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "concurrent_requests": "requests at once",
}


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a request holds of its tenant's limits; `quotas` has those per minute, by name."""

    quotas: Mapping[str, Quota]
    _wanted: int = 0
    _settle: Callable[[int], None] = lambda difference: None

    def settle(self, used: int) -> None:
        """The request has ended and used so many tokens. To be called once."""
        self._settle(used - self._wanted)


_NOTHING = Reservation({})


class Limits:
    """Counts in Redis; while it is away, or where there is none, as the configuration says."""

    def __init__(
        self,
        shared: SharedLimits | None,
        on_refused: Callable[[str, LimitName], None] = lambda tenant, limit: None,
    ) -> None:
        """`on_refused` is told the tenant and the limit of each request that is refused."""
        self._shared = shared
        self._local = LocalLimits()
        self._on_refused = on_refused
        self._away = Configuration().limits.when_redis_is_away

    def update(self, configuration: Configuration) -> None:
        self._away = configuration.limits.when_redis_is_away

    async def reserve(self, tenant: Tenant | None, tokens: int) -> Reservation:
        """Counts a request that may use `tokens`, prompt and answer together.

        Raises RateLimited, and LimitsUnavailable where a limit may not be counted without Redis.
        """
        if tenant is None or not tenant.limited:
            return _NOTHING
        request = LimitRequest(
            tenant.name,
            tenant.requests_per_minute,
            tenant.tokens_per_minute,
            tenant.concurrent_requests,
            tokens,
        )
        decision = None
        settle = self._local.settle
        if self._shared is not None:
            decision = await self._shared.take(request)
            if decision is not None:
                settle = self._shared.settle
            else:
                request = self._alone(request)
        if decision is None:
            decision = self._local.take(request, time.monotonic_ns() // 1_000_000)
        quotas = _quotas(request, decision)
        if decision.refused is not None:
            self._on_refused(tenant.name, decision.refused)
            raise _refusal(request, decision, decision.refused, quotas)
        if request.tokens is None and request.concurrent is None:
            return Reservation(quotas)
        name, second, counted = request.tenant, decision.second, request.concurrent is not None

        def settled(difference: int) -> None:
            settle(Settlement(name, second, difference, counted))

        return Reservation(quotas, tokens, settled)

    def _alone(self, request: LimitRequest) -> LimitRequest:
        """What is left of a request without Redis."""

        def kept(limit: int | None, away: RedisUnavailablePolicy, name: LimitName) -> int | None:
            if limit is not None and away == "refuse":
                raise LimitsUnavailable(
                    f"The limit of {_WORDS[name]} cannot be counted now; try again.", limit=name
                )
            return None if away == "allow" else limit

        away = self._away
        return LimitRequest(
            request.tenant,
            kept(request.requests, away.requests_per_minute, "requests_per_minute"),
            kept(request.tokens, away.tokens_per_minute, "tokens_per_minute"),
            kept(request.concurrent, away.concurrent_requests, "concurrent_requests"),
            request.wanted,
        )


def _quotas(request: LimitRequest, decision: Decision) -> dict[str, Quota]:
    """Of the limits that there are."""
    quotas: dict[str, Quota] = {}
    if request.requests is not None:
        quotas["requests_per_minute"] = Quota(
            request.requests, decision.remaining_requests, decision.reset_requests_ms
        )
    if request.tokens is not None:
        quotas["tokens_per_minute"] = Quota(
            request.tokens, decision.remaining_tokens, decision.reset_tokens_ms
        )
    return quotas


def _refusal(
    request: LimitRequest, decision: Decision, refused: LimitName, quotas: Mapping[str, Quota]
) -> RateLimited:
    if refused == "concurrent_requests":
        limit, remaining = request.concurrent, 0
    else:
        limit, remaining, _ = quotas[refused]
    requested = request.wanted if refused == "tokens_per_minute" else 1
    facts = f"{_WORDS[refused]}: limit {limit}, remaining {remaining}, requested {requested}"
    if decision.wait_ms == NEVER:
        message, wait_ms = f"Request too large for the limit of {facts}.", None
    else:
        wait_ms = decision.wait_ms
        message = f"Rate limit reached: {facts}. Please try again in {duration(wait_ms)}."
    return RateLimited(message, limit=refused, wait_ms=wait_ms, quotas=quotas)


def duration(milliseconds: int) -> str:
    """As OpenAI writes it: ``120ms``, ``1s``, ``7.66s``, ``6m0s``, ``1h0m30s``."""
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds
