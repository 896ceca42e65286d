"""Counting of requests in their tenants' limits, and the errors for refused requests.

Requests are counted in Redis or in this process. All other code of the gateway counts requests
through the class `Limits`.
"""

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
from gateway.tenancy.limits.budgets import BudgetUsage
from gateway.tenancy.limits.local import LocalLimits
from gateway.tenancy.limits.redis import SharedLimits
from gateway.tenancy.limits.request import NEVER, Decision, LimitRequest, Spending
from gateway.tenancy.limits.reservation import CountedRequest, Reservation


class Limits:
    """Counter of all tenants' limits.

    Usage is counted in Redis. While Redis is down, the field `when_redis_is_away` of the
    configuration file decides for each limit: this process counts alone, refuses the requests, or
    ignores the limit. If no Redis is configured, all usage is counted in this process.
    """

    def __init__(
        self,
        shared: SharedLimits | None,
        on_refused: Callable[[str, LimitName], None] = lambda tenant, limit: None,
        standings: BudgetUsage | None = None,
        on_alone: Callable[[], object] = lambda: None,
    ) -> None:
        """Create the counter.

        Args:
            shared: the limits in Redis; None without Redis.
            on_refused: called with the tenant and the exceeded limit for each refused request.
            standings: usage of the tenants' budgets, as Redis reports it to `shared`.
            on_alone: called for each request that is not counted in Redis because Redis is down.
        """
        self._shared = shared
        self._local = LocalLimits(lambda: time.monotonic_ns() // 1_000_000)
        self._on_refused = on_refused
        self._standings = standings or BudgetUsage()
        self._on_alone = on_alone
        self._unavailable_policies = Configuration().limits.when_redis_is_away
        self._last_quotas: dict[
            str, dict[tuple[LimitName, ...], tuple[Mapping[str, Quota], float]]
        ] = {}
        """Usage of limits at a tenant's last request, and the time of this request.

        The first key is the tenant's name. The second key has the names of the limits in which the
        request was counted. Times are in seconds of `time.monotonic`.
        """

    def report(self, tenant: str) -> dict[LimitName, Quota]:
        """Return the usage of a tenant's limits at the tenant's last request to this process.

        If the period of a limit has ended since then, its usage is reported as 0. The usage is
        stored for all tenants; their number is bounded by the configuration.
        """
        now = time.monotonic()
        known: dict[LimitName, Quota] = {}
        for quotas, at in sorted(self._last_quotas.get(tenant, {}).values(), key=itemgetter(1)):
            for name in LIMITS:
                if (quota := quotas.get(name)) is not None:
                    counts = now - at < quota.reset_ms / 1000
                    known[name] = quota if counts else quota._replace(used=0, held=0)
        for name, quota in known.items():
            used = self._standings.used_of(tenant, name) if LIMITS[name].budget else None
            if used is not None:
                known[name] = quota._replace(used=used)
        return known

    @property
    def counts_alone(self) -> bool:
        """True while this process counts without Redis, although Redis is configured."""
        return self._shared is not None and not self._shared.up

    @property
    def nearly_used(self) -> dict[str, str]:
        """Warning texts for budgets that are at least 80 % used. See `BudgetUsage.nearly_used`."""
        return self._standings.nearly_used

    def update(self, configuration: Configuration) -> None:
        self._unavailable_policies = configuration.limits.when_redis_is_away

    async def count(self, tenant: Tenant | None, slots: int) -> Reservation:
        """Count a request in the tenant's limits, before the request's body is read.

        The request takes `slots` slots of `concurrent_requests`. The returned reservation holds
        them until it is closed.

        Raises:
            RateLimited: a limit is reached.
            LimitsUnavailable: Redis is down, and a limit must not be counted locally.
        """
        reservation = Reservation(self, tenant)
        if tenant is not None and tenant.request_limits:
            await reservation.take(
                LimitRequest(tenant=tenant.name, limits=tenant.request_limits, slots=slots)
            )
        return reservation

    async def take(self, request: LimitRequest) -> CountedRequest:
        """Count a request if its limits allow it. Return the decision, which may be a refusal.

        Raise LimitsUnavailable if Redis is down and a limit must not be counted locally.
        """
        if self._shared is not None:
            decision = self._shared.decide(request)
            decision = (
                decision or await self._shared.take(request) or self._refuse_by_budget(request)
            )
            if decision is not None:
                self._store_quotas(request, decision)
                return CountedRequest(request, decision, self._shared)
            self._on_alone()
            request = self._select_local_limits(request)
        decision = self._local.take(request)
        self._store_quotas(request, decision)
        return CountedRequest(request, decision, self._local)

    def _store_quotas(self, request: LimitRequest, decision: Decision) -> None:
        known = self._last_quotas.get(request.tenant)
        if known is None:
            known = self._last_quotas[request.tenant] = {}
        known[tuple(request.limits)] = decision.quotas, time.monotonic()

    def spend(self, tenant: Tenant, tokens: int) -> None:
        """Count used tokens in the tenant's budgets.

        While Redis is down, this process stores the number of tokens, and reports it to Redis once
        Redis is available again.
        """
        if self._shared is not None and (budgets := tenant.budgets):
            self._shared.spend(Spending(tenant.name, budgets, tokens))

    def build_refusal(
        self, taken: CountedRequest, limit: LimitName, quotas: Mapping[str, Quota]
    ) -> RateLimited:
        """Return the error for a refused request, and report the refusal to `on_refused`."""
        self._on_refused(taken.request.tenant, limit)
        return _build_refusal(taken.request, taken.decision, limit, quotas)

    def _refuse_by_budget(self, request: LimitRequest) -> Decision | None:
        """Refuse a request if it exceeds a budget according to the last report of Redis.

        `take` calls this when Redis has not answered in time. Without this check, a tenant could
        exceed its budget whenever Redis is slow. Return None if the request fits into all budgets,
        or if their usage is unknown. An old report suffices to refuse a request, because the usage
        of a budget only grows within its day or month.
        """
        for name, limit in request.budgets.items():
            standing = self._standings.used_and_reset(request.tenant, name)
            if standing is not None and standing[0] + request.amount_of(name) > limit:
                used, reset_ms = standing
                quotas: dict[str, Quota] = {name: Quota(limit, used, reset_ms)}
                return Decision(name, reset_ms, quotas, time.time_ns() // 1_000_000)
        return None

    def _select_local_limits(self, request: LimitRequest) -> LimitRequest:
        """Return a copy of the request with only the limits that this process counts without Redis.

        The configuration has a policy per limit for the time while Redis is down. Raise
        LimitsUnavailable if the policy of one of the request's limits is "refuse".
        """
        local_limits: dict[LimitName, int] = {}
        for name, limit in request.limits.items():
            away: RedisUnavailablePolicy = getattr(self._unavailable_policies, name)
            if away == "refuse":
                raise LimitsUnavailable(
                    f"The limit of {_words(name)} cannot be counted now; try again.", limit=name
                )
            if away == "local":
                local_limits[name] = limit
        return replace(request, limits=local_limits)


def _build_refusal(
    request: LimitRequest, decision: Decision, refused: LimitName, quotas: Mapping[str, Quota]
) -> RateLimited:
    quota, requested, wait_ms = quotas[refused], request.amount_of(refused), decision.wait_ms
    left = f"remaining {quota.remaining}, requested {requested}"
    facts = f"{_words(refused)}: limit {quota.limit}, {left}"
    if wait_ms == NEVER:
        message = f"Request too large for the limit of {facts}."
        return RateLimited(message, limit=refused, wait_ms=None, quotas=quotas)
    # Report the budget as exhausted only if the used tokens alone leave too few tokens for this
    # request. If the request would fit without the tokens that running requests have reserved, it
    # may succeed soon: running requests give back the tokens that they do not use.
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
    """Format milliseconds as OpenAI does: ``120ms``, ``1s``, ``7.66s``, ``6m0s``, ``1h0m30s``."""
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{seconds}"
    return f"{minutes}m{seconds}" if minutes else seconds
