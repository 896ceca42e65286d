"""Lease: a part of a tenant's limits that Redis has granted to this process in advance.

The units of limits are requests, tokens and slots (concurrent requests). Redis grants several units
to a process at once, and counts them as used. The process then admits requests without calling
Redis, as long as they need no more than the granted units. Granted units that no request has taken
yet are "spare". The process regularly reports to Redis how many units were really used. If a
process dies, its lease expires. Redis then counts its units as used at the time of the expiry.

The sliding windows in Redis count a request at the time of its report. This time may be later than
the arrival of the request, but never earlier.

See decision 089 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from gateway.config.limits import LimitName
from gateway.errors import Quota
from gateway.tenancy.limits.budgets import BudgetTotal
from gateway.tenancy.limits.demand import UnitDemand
from gateway.tenancy.limits.request import (
    REQUESTS,
    SLOTS,
    TOKENS,
    UNITS,
    WINDOW_S,
    Decision,
    LimitRequest,
    Settlement,
    Spending,
    units_of_request,
)
from gateway.tenancy.limits.script import Grant, ScriptCall

LEASE_S = 15.0
TICK_S = 0.25
_RENEW_INTERVAL_S = 5.0
_MAX_REPORT_DELAY_S = 1.0
"""Maximum time in seconds until a request that was admitted without Redis is reported to Redis."""
_MAX_REFUSAL_AGE_S = 1.0
"""Seconds for which a refusal by Redis is repeated for equal requests without asking Redis.

The time is short, because Redis may lose its counts at any time and then admit such requests.
"""


def _units(request: LimitRequest) -> tuple[int, int, int]:
    return request.requests, request.tokens, request.slots


class Lease:
    """Units of one tenant's limits that this process may use without asking Redis.

    The caller sends the calls that `call` returns to Redis, and passes the answers to `apply`. Only
    one call of a lease may be in flight at a time. Not thread-safe.

    Attributes:
        in_flight: True while the last call has no answer.
        called_at: time of the last call, in seconds of the clock.
        is_urgent: True if the next call should be sent at once, because other gateways may wait for
            the units that it gives back.
    """

    def __init__(
        self,
        tenant: str,
        clock: Callable[[], float],
        epoch: Callable[[], int] = lambda: 0,
        totals: Callable[[str], Sequence[BudgetTotal]] = lambda _: (),
    ) -> None:
        """Create a lease that has no units yet.

        Args:
            tenant: the tenant's name.
            clock: returns the monotonic time in seconds.
            epoch: returns a number that changes when Redis may have lost its data. Redis then no
                longer counts the units that it has granted.
            totals: returns the known usage of a tenant's budgets.
        """
        self.tenant = tenant
        self.in_flight = False
        self.is_urgent = False
        self._clock = clock
        self._now_epoch = epoch
        self._totals = totals
        self._epoch = -1
        self._valid_until = 0.0
        self._number = 0
        self._limits: dict[LimitName, int] = {}
        self._budgets: Mapping[LimitName, int] = {}
        self._known_budgets: Mapping[LimitName, int] | None = None
        """The field `budgets` of the last argument of `spend`; already included in `_budgets`."""
        self._spare, self._shares = [0, 0, 0], [0, 0, 0]
        self._held = [0, 0, 0]
        self._used, self._known = [0, 0], [0, 0]
        self._spent = self._spent_known = 0
        self._demands = (UnitDemand(), UnitDemand(), UnitDemand())
        self._quotas: Mapping[LimitName, Quota] = {}
        self._refusal: tuple[LimitRequest, Decision] | None = None
        self._offset_ms = 0
        self._is_calm = False
        self._changed = False
        self._due_at = 0.0
        self.called_at = 0.0

    def decide(self, request: LimitRequest) -> Decision | None:
        """Admit or refuse a request without asking Redis. Return None if Redis must be asked."""
        limits, units, spare, known = request.limits, _units(request), self._spare, self._quotas
        kinds = units_of_request(request)
        for name, unit, _ in kinds.limits:
            quota = known.get(name)
            if quota is None or units[unit] > spare[unit] or quota.limit != limits[name]:
                return self._repeat_refusal(request) if self._refusal else None
        now = self._clock()
        if not self._is_covered(now):
            return None
        for unit in kinds.units:
            spare[unit] -= units[unit]
            self._demands[unit].take(units[unit])
            if unit == REQUESTS:
                self._used[unit] += units[unit]
            else:
                self._held[unit] += units[unit]
        self._schedule_report(now + _MAX_REPORT_DELAY_S)
        now_ms = round(now * 1000) + self._offset_ms
        reset_ms = (now_ms // 1000 + WINDOW_S + 1) * 1000 - now_ms
        age_ms = int((now - self.called_at) * 1000)
        quotas: dict[str, Quota] = {}
        for name, unit, is_budget in kinds.limits:
            limit, used, reset_of_it, held = known[name]
            if is_budget:
                quotas[name] = Quota(limit, used, max(0, reset_of_it - age_ms), held - spare[unit])
            else:
                quotas[name] = Quota(limit, used - spare[unit], reset_ms if reset_of_it else 0)
        return Decision(None, 0, quotas, now_ms)

    def build_refusal(self, request: LimitRequest, grant: Grant) -> Decision:
        """Return the decision for a request that Redis has refused.

        If Redis would also refuse an equal request within the next second, the decision is stored,
        and `decide` returns it for such requests.
        """
        quotas: dict[str, Quota] = {}
        for name, unit, is_budget in units_of_request(request).limits:
            quota, spare = grant.quotas[name], self._spare[unit]
            if is_budget:
                quotas[name] = quota._replace(held=quota.held - spare)
            else:
                quotas[name] = quota._replace(used=quota.used - spare)
        decision = Decision(grant.refused, grant.wait_ms, quotas, grant.now_ms)
        # Store only refusals by requests_per_minute. Used requests are never given back, unlike
        # tokens and slots. If no gateway can give back spare requests (`may_return`), this limit
        # therefore remains exhausted for `wait_ms`.
        if grant.refused == "requests_per_minute" and not grant.may_return and grant.wait_ms > 0:
            self._refusal = request, decision
        return decision

    def _repeat_refusal(self, request: LimitRequest) -> Decision | None:
        assert self._refusal is not None
        same, (refused, wait_ms, quotas, at_ms) = self._refusal
        now_ms = round(self._clock() * 1000) + self._offset_ms
        age_ms = now_ms - at_ms
        if age_ms >= min(wait_ms, _MAX_REFUSAL_AGE_S * 1000) or self._epoch != self._now_epoch():
            self._refusal = None
            return None
        if request != same:
            return None
        aged = {n: q._replace(reset_ms=max(0, q.reset_ms - age_ms)) for n, q in quotas.items()}
        return Decision(refused, wait_ms - age_ms, aged, now_ms)

    def settle(self, settlement: Settlement) -> None:
        _, released, used, still_held, slots = settlement
        freed = [0, 0, slots]
        if released or used or still_held:
            self._held[TOKENS] += still_held - released
            self._used[TOKENS] += used
            freed[TOKENS] = max(0, released - still_held - used)
        self._held[SLOTS] -= slots
        now = self._clock()
        # Keep the freed units in this process only if the usage is far below all limits. Otherwise
        # give them back to Redis, because other gateways may need them.
        may_reuse = self._is_covered(now) and self._is_calm
        for unit in (TOKENS, SLOTS):
            self._demands[unit].give_back(freed[unit])
            if may_reuse:
                self._spare[unit] += freed[unit]
        if not any(freed):
            self._schedule_report(now + _RENEW_INTERVAL_S)
            return
        self._schedule_report(now)
        if not self._is_calm:
            self.is_urgent = True

    def spend(self, spending: Spending) -> None:
        if spending.budgets is not self._known_budgets:
            # Never remove budgets. A request that started before a configuration change does not
            # name a new budget, but its tokens must count in that budget.
            self._budgets = {**self._budgets, **spending.budgets}
            self._known_budgets = spending.budgets
        self._spent += spending.tokens
        self._schedule_report(self._clock() + _RENEW_INTERVAL_S)

    def _schedule_report(self, due_at: float) -> None:
        """Make a report to Redis due at the time `due_at`, unless a report is due earlier."""
        self._due_at = min(self._due_at, due_at) if self._changed else due_at
        self._changed = True

    def _update_calm(self) -> None:
        """Set `_is_calm`: True if the usage is so far below all limits that no request must wait.

        The usage is low enough if Redis allows this process to hold spare units for at least four
        average requests.
        """
        units = {UNITS[name] for name in self._limits}
        self._is_calm = all(self._shares[unit] >= self._demands[unit].floor for unit in units)

    def _is_covered(self, now: float) -> bool:
        """Return True while the lease is valid, and Redis counts the lease's spare units as used.

        If the lease has expired or Redis may have lost it, drop the spare units and return False.
        """
        if now < self._valid_until and self._epoch == self._now_epoch():
            return True
        self._spare = [0, 0, 0]
        return False

    @property
    def has_surplus(self) -> bool:
        """True if this process should give spare units back to Redis.

        This is the case if the usage is near a limit, and this process has more spare units than it
        needs for the next tick, or more than Redis allows.
        """
        if self._is_calm:
            return False
        bounds = zip(self._spare, self._demands, self._shares, strict=True)
        return any(spare > min(demand.wish, share) for spare, demand, share in bounds)

    @property
    def is_idle(self) -> bool:
        """True if this process holds no units of the tenant and has no usage to report to Redis."""
        return not (self._changed or self.in_flight or any(self._held) or any(self._spare))

    def tick(self) -> bool:
        """Record that `TICK_S` seconds have passed. Return True if a call to Redis is due."""
        for demand in self._demands:
            demand.roll()
        self._update_calm()
        now = self._clock()
        if any(self._spare) or (self._changed and now >= self._due_at):
            return True
        return any(self._held) and now - self.called_at >= _RENEW_INTERVAL_S

    def lose(self) -> None:
        """Record that the call in flight has failed. Redis may or may not have executed it."""
        self.in_flight = False
        self._schedule_report(0.0)

    def restate(self) -> None:
        """Make the next report to Redis due now. Call this when Redis may have lost its data."""
        self._schedule_report(0.0)

    def call(
        self,
        head: LimitRequest | None = None,
        queued: Iterable[LimitRequest] = (),
        *,
        is_last: bool = False,
    ) -> ScriptCall:
        """Return the next call of the Redis script, which reports usage and asks for units.

        Args:
            head: the first request that waits for Redis. The script decides if this request gets
                its units. None if no request waits.
            queued: the other waiting requests. The script also grants units for them, if the limits
                allow it.
            is_last: True to give back all spare units, because the process ends.
        """
        wished = [0 if is_last else demand.wish for demand in self._demands]
        now = self._clock()
        if head is not None:
            self._learn_limits(head)
            self._spare = [0, 0, 0]
        elif self._is_covered(now):
            bounds = zip(self._spare, wished, self._shares, strict=True)
            self._spare = [min(units) for units in bounds]
        self._number += 1
        self.in_flight, self.is_urgent, self._changed = True, False, False
        self.called_at = now
        further = [0, 0, 0]
        for request in queued:
            units = _units(request)
            for unit in units_of_request(request).units:
                further[unit] += units[unit]
        state: dict[str, object] = {
            "call": self._number,
            "used": self._used,
            "known": self._known,
            "held": self._held,
            "keep": self._spare,
            "queued": further,
            "wish": wished,
            "floor": [demand.floor for demand in self._demands],
            "spent": self._spent,
            "spent_known": self._spent_known,
        }
        return ScriptCall(
            tenant=self.tenant,
            state={name: [*v] if isinstance(v, list) else v for name, v in state.items()},
            limits=dict(self._limits),
            budgets=self._budgets,
            totals=self._totals(self.tenant) if self._budgets else (),
            used=(*self._used,),
            spent=self._spent,
            spare=(*self._spare,),
            head=head,
            epoch=self._now_epoch(),
            sent_at=now,
        )

    def _learn_limits(self, request: LimitRequest) -> None:
        """Store the limits of a request, which may have changed with the configuration.

        The request's limits replace all stored limits that count the same units (requests, tokens
        or slots).
        """
        taken = units_of_request(request).units
        others = {n: limit for n, limit in self._limits.items() if UNITS[n] not in taken}
        self._limits = {**request.limits, **others}
        self._budgets = {**self._budgets, **request.budgets}

    def apply(self, call: ScriptCall, grant: Grant) -> None:
        """Add the units that Redis has granted in its answer to a call.

        If the connection to Redis was lost since the call was made, ignore the answer, because
        Redis may have lost its record of these units.
        """
        self.in_flight = False
        if call.epoch != self._now_epoch():
            self._schedule_report(0.0)
            return
        self._known = [max(pair) for pair in zip(self._known, call.used, strict=True)]
        self._spent_known = max(self._spent_known, call.spent)
        self._offset_ms = grant.now_ms - round(self._clock() * 1000)
        self._quotas, self._shares = grant.quotas, [*grant.shares]
        self._epoch, self._valid_until = call.epoch, call.sent_at + LEASE_S
        for unit, units in enumerate(grant.granted):
            self._spare[unit] += units
        self._update_calm()
