"""A tenant's limits: where they are counted now, and how a refusal is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from gateway.config.file import Configuration, RedisUnavailablePolicy
from gateway.config.tenants import Tenant
from gateway.errors import LimitsUnavailable, Quota, RateLimited
from gateway.tenancy.limits.local import LocalLimits
from gateway.tenancy.limits.redis import SharedLimits
from gateway.tenancy.limits.request import NEVER, Decision, LimitName, LimitRequest
from gateway.tenancy.limits.reservation import Reservation, Taken

_WORDS: dict[LimitName, str] = {
    "requests_per_minute": "requests per minute",
    "tokens_per_minute": "tokens per minute",
    "concurrent_requests": "requests at once",
}


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

    async def count(self, tenant: Tenant | None, places: int = 0) -> Reservation:
        """Counts a request, before its body is read, and takes `places` for it.

        Raises RateLimited, and LimitsUnavailable where a limit may not be counted without Redis.
        """
        reservation = Reservation(self, tenant)
        if tenant is None:
            return reservation
        concurrent = tenant.concurrent_requests if places else None
        if tenant.requests_per_minute is not None or concurrent is not None:
            await reservation.take(
                LimitRequest(
                    tenant=tenant.name,
                    requests=tenant.requests_per_minute,
                    concurrent=concurrent,
                    places=places,
                )
            )
        return reservation

    async def take(self, request: LimitRequest) -> Taken:
        """Raises LimitsUnavailable. What is refused is not raised here."""
        if self._shared is not None:
            decision = await self._shared.take(request)
            if decision is not None:
                return Taken(request, decision, self._shared)
            request = self._alone(request)
        decision = self._local.take(request, time.monotonic_ns() // 1_000_000)
        return Taken(request, decision, self._local)

    def refuse(self, taken: Taken, limit: LimitName, quotas: Mapping[str, Quota]) -> RateLimited:
        """The failure, counted."""
        self._on_refused(taken.request.tenant, limit)
        return _refusal(taken.request, taken.decision, limit, quotas)

    def _alone(self, request: LimitRequest) -> LimitRequest:
        """What is left of a request without Redis."""

        def kept(limit: int | None, away: RedisUnavailablePolicy, name: LimitName) -> int | None:
            if limit is not None and away == "refuse":
                raise LimitsUnavailable(
                    f"The limit of {_WORDS[name]} cannot be counted now; try again.", limit=name
                )
            return None if away == "allow" else limit

        away = self._away
        return replace(
            request,
            requests=kept(request.requests, away.requests_per_minute, "requests_per_minute"),
            tokens=kept(request.tokens, away.tokens_per_minute, "tokens_per_minute"),
            concurrent=kept(request.concurrent, away.concurrent_requests, "concurrent_requests"),
        )


def _refusal(
    request: LimitRequest, decision: Decision, refused: LimitName, quotas: Mapping[str, Quota]
) -> RateLimited:
    if refused == "concurrent_requests":
        limit, remaining = request.concurrent, 0
    else:
        limit, remaining, _ = quotas[refused]
    requested = {
        "requests_per_minute": 1,
        "tokens_per_minute": request.wanted,
        "concurrent_requests": request.places,
    }[refused]
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
