"""A tenant's limits: where they are counted now, and how a refusal is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from operator import itemgetter

from gateway.config.file import Configuration
from gateway.config.limits import LIMITS, LimitName, RedisUnavailablePolicy
from gateway.config.tenants import Tenant
from gateway.errors import InsufficientQuota, LimitsUnavailable, Quota, RateLimited
from gateway.tenancy.limits.budgets import Standings
from gateway.tenancy.limits.local import LocalLimits
from gateway.tenancy.limits.redis import SharedLimits
from gateway.tenancy.limits.request import NEVER, Decision, LimitRequest, Spending
from gateway.tenancy.limits.reservation import Reservation, Taken


class Limits:
    """Counts in Redis; while it is away, or where there is none, as the configuration says."""

    def __init__(
        self,
        shared: SharedLimits | None,
        on_refused: Callable[[str, LimitName], None] = lambda tenant, limit: None,
        standings: Standings | None = None,
        on_alone: Callable[[], object] = lambda: None,
    ) -> None:
        """`on_refused` is told the tenant and the limit of each request that is refused.

        `on_alone` is called for each request that Redis should have counted and did not.
        `standings` are what `shared` was told of budgets.
        """
        self._shared = shared
        self._local = LocalLimits(lambda: time.monotonic_ns() // 1_000_000)
        self._on_refused = on_refused
        self._standings = standings or Standings()
        self._on_alone = on_alone
        self._away = Configuration().limits.when_redis_is_away
        self._told: dict[str, dict[tuple[LimitName, ...], tuple[Mapping[str, Quota], float]]] = {}
        """The last quotas and their time, by tenant and the limits of a request."""

    def told(self, tenant: str) -> dict[LimitName, Quota]:
        """What is used of its limits, as far as this process was told with its last request.

        Of a minute only what may still count. There are no more tenants than the configuration has
        had.
        """
        now = time.monotonic()
        known: dict[LimitName, Quota] = {}
        for quotas, at in sorted(self._told.get(tenant, {}).values(), key=itemgetter(1)):
            for name in LIMITS:
                if (quota := quotas.get(name)) is not None:
                    counts = now - at < quota.reset_ms / 1000
                    known[name] = quota if counts else quota._replace(used=0, held=0)
        for name, quota in known.items():
            used = self._standings.used(tenant, name) if LIMITS[name].budget else None
            if used is not None:
                known[name] = quota._replace(used=used)
        return known

    @property
    def counts_alone(self) -> bool:
        """True while Redis should count and does not."""
        return self._shared is not None and not self._shared.up

    @property
    def nearly_used(self) -> dict[str, str]:
        """See `Standings.nearly_used`."""
        return self._standings.nearly_used

    def update(self, configuration: Configuration) -> None:
        self._away = configuration.limits.when_redis_is_away

    async def count(self, tenant: Tenant | None, places: int) -> Reservation:
        """Counts a request, before its body is read, and takes `places` for it.

        Raises RateLimited, and LimitsUnavailable where a limit may not be counted without Redis.
        """
        reservation = Reservation(self, tenant)
        if tenant is not None and tenant.request_limits:
            await reservation.take(
                LimitRequest(tenant=tenant.name, limits=tenant.request_limits, places=places)
            )
        return reservation

    async def take(self, request: LimitRequest) -> Taken:
        """Raises LimitsUnavailable. What is refused is not raised here."""
        if self._shared is not None:
            decision = self._shared.decide(request)
            decision = decision or await self._shared.take(request) or self._used_up(request)
            if decision is not None:
                self._note(request, decision)
                return Taken(request, decision, self._shared)
            self._on_alone()
            request = self._alone(request)
        decision = self._local.take(request)
        self._note(request, decision)
        return Taken(request, decision, self._local)

    def _note(self, request: LimitRequest, decision: Decision) -> None:
        known = self._told.get(request.tenant)
        if known is None:
            known = self._told[request.tenant] = {}
        known[tuple(request.limits)] = decision.quotas, time.monotonic()

    def spend(self, tenant: Tenant, tokens: int) -> None:
        """Counted when Redis is back, where it is away."""
        if self._shared is not None and (budgets := tenant.budgets):
            self._shared.spend(Spending(tenant.name, budgets, tokens))

    def refuse(self, taken: Taken, limit: LimitName, quotas: Mapping[str, Quota]) -> RateLimited:
        """The failure, counted."""
        self._on_refused(taken.request.tenant, limit)
        return _refusal(taken.request, taken.decision, limit, quotas)

    def _used_up(self, request: LimitRequest) -> Decision | None:
        """The refusal of what cannot fit a budget, by what Redis said last.

        It need not be asked for that: what is used of a budget grows until its day or month ends.
        So being late, on a busy machine say, lets nobody spend more.
        """
        for name, limit in request.budgets.items():
            standing = self._standings.standing(request.tenant, name)
            if standing is not None and standing[0] + request.wanted(name) > limit:
                used, reset_ms = standing
                quotas: dict[str, Quota] = {name: Quota(limit, used, reset_ms)}
                return Decision(name, reset_ms, quotas, time.time_ns() // 1_000_000)
        return None

    def _alone(self, request: LimitRequest) -> LimitRequest:
        """What is left of a request without Redis. Raises LimitsUnavailable."""
        kept: dict[LimitName, int] = {}
        for name, limit in request.limits.items():
            away: RedisUnavailablePolicy = getattr(self._away, name)
            if away == "refuse":
                raise LimitsUnavailable(
                    f"The limit of {_words(name)} cannot be counted now; try again.", limit=name
                )
            if away == "local":
                kept[name] = limit
        return replace(request, limits=kept)


def _refusal(
    request: LimitRequest, decision: Decision, refused: LimitName, quotas: Mapping[str, Quota]
) -> RateLimited:
    quota, requested, wait_ms = quotas[refused], request.wanted(refused), decision.wait_ms
    left = f"remaining {quota.remaining}, requested {requested}"
    facts = f"{_words(refused)}: limit {quota.limit}, {left}"
    if wait_ms == NEVER:
        message = f"Request too large for the limit of {facts}."
        return RateLimited(message, limit=refused, wait_ms=None, quotas=quotas)
    # What running requests hold of a budget may come back in a moment.
    if LIMITS[refused].budget and quota.used + requested > quota.limit:
        again = datetime.fromtimestamp((decision.now_ms + wait_ms) // 1000, UTC)
        used = f"limit {quota.limit}, used {quota.used}, requested {requested}"
        message = (
            f"Quota exceeded: {_words(refused)}: {used}. It begins again at {again:%F %T} UTC."
        )
        return InsufficientQuota(message, limit=refused, wait_ms=wait_ms, quotas=quotas)
    message = f"Rate limit reached: {facts}. Please try again in {duration(wait_ms)}."
    return RateLimited(message, limit=refused, wait_ms=wait_ms, quotas=quotas)


def _words(limit: LimitName) -> str:
    return limit.replace("_", " ")


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
