"""Lease of one tenant: units that Redis has granted to this process in advance.

The units of limits are requests, tokens and slots (concurrent requests). Redis counts granted units
as used until the process reports how many were really used, or until the lease expires. Granted
units that no request has taken yet are "spare". A request that fits into the spare units is
admitted without a call to Redis. The sliding windows in Redis count the request in the second of
the report, which may be later than the request, but never earlier.

See decision 089 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from gateway.config.limits import LimitName
from gateway.errors import Quota
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
"""Maximum time in seconds for which a refusal is repeated without asking Redis.

The time is short because Redis may lose its counts meanwhile, and would then admit the request.
"""


def _units(request: LimitRequest) -> tuple[int, int, int]:
    return request.requests, request.tokens, request.slots


class Lease:
    """Units of one tenant that this process may use, and the reports to Redis about them.

    Not thread-safe. At most one call to Redis may be in flight.

    Attributes:
        in_flight: True while the last call has no answer.
        called_at: time of the last call, in seconds of the clock.
        is_urgent: True if the next call should be sent at once: other gateways may wait for the
            units that the call gives back.
    """

    def __init__(
        self, tenant: str, clock: Callable[[], float], epoch: Callable[[], int] = lambda: 0
    ) -> None:
        """Start without units.

        Args:
            tenant: the tenant's name.
            clock: returns the monotonic time in seconds.
            epoch: returns a number that changes when Redis may have lost the record of this lease.
        """
        self.tenant = tenant
        self.in_flight = False
        self.is_urgent = False
        self._clock = clock
        self._now_epoch = epoch
        self._epoch = -1
        self._valid_until = 0.0
        self._number = 0
        self._limits: dict[LimitName, int] = {}
        self._budgets: Mapping[LimitName, int] = {}
        self._known_budgets: Mapping[LimitName, int] | None = None
        """Budgets of the last `spend`. All of them are in `_budgets`."""
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

        A refusal that remains correct for some time is stored, and `decide` repeats it.
        """
        quotas: dict[str, Quota] = {}
        for name, unit, is_budget in units_of_request(request).limits:
            quota, spare = grant.quotas[name], self._spare[unit]
            if is_budget:
                quotas[name] = quota._replace(held=quota.held - spare)
            else:
                quotas[name] = quota._replace(used=quota.used - spare)
        decision = Decision(grant.refused, grant.wait_ms, quotas, grant.now_ms)
        # Store only refusals by requests_per_minute. Requests are never given back, so this limit
        # remains exhausted for `wait_ms` unless a gateway has spare requests.
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
        # Keep freed units in this process only if the usage is far below all limits. Near a limit,
        # give them back to Redis, which may grant them to other gateways.
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
        """Record that Redis must get a report by `due_at`."""
        self._due_at = min(self._due_at, due_at) if self._changed else due_at
        self._changed = True

    def _update_calm(self) -> None:
        """Set `_is_calm`: True if usage is so low that no gateway needs to wait for units."""
        units = {UNITS[name] for name in self._limits}
        self._is_calm = all(self._shares[unit] >= self._demands[unit].floor for unit in units)

    def _is_covered(self, now: float) -> bool:
        """Return True while the lease is valid: Redis counts its spare units as used.

        Otherwise drop the spare units and return False.
        """
        if now < self._valid_until and self._epoch == self._now_epoch():
            return True
        self._spare = [0, 0, 0]
        return False

    @property
    def has_surplus(self) -> bool:
        """True if this process has more spare units than it needs while other gateways may wait."""
        if self._is_calm:
            return False
        bounds = zip(self._spare, self._demands, self._shares, strict=True)
        return any(spare > min(demand.wish, share) for spare, demand, share in bounds)

    @property
    def is_idle(self) -> bool:
        """True if nothing must be reported to Redis, and this process holds no units."""
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
        """Make a report to Redis due now. Called when Redis may have lost its data."""
        self._schedule_report(0.0)

    def call(
        self,
        head: LimitRequest | None = None,
        queued: Iterable[LimitRequest] = (),
        *,
        is_last: bool = False,
    ) -> ScriptCall:
        """Return the next call to Redis, which reports usage and asks for units.

        Until Redis answers the call, only requests that fit into the spare units are admitted.

        Args:
            head: the first waiting request, which the script admits or refuses; None if no request
                waits.
            queued: further waiting requests, for which the script grants units if it can.
            is_last: True to give up all spare units, because the process ends.
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
            used=(*self._used,),
            spent=self._spent,
            spare=(*self._spare,),
            head=head,
            epoch=self._now_epoch(),
            sent_at=now,
        )

    def _learn_limits(self, request: LimitRequest) -> None:
        """Store a request's limits. They replace all stored limits that count the same units."""
        taken = units_of_request(request).units
        others = {n: limit for n, limit in self._limits.items() if UNITS[n] not in taken}
        self._limits = {**request.limits, **others}
        self._budgets = {**self._budgets, **request.budgets}

    def apply(self, call: ScriptCall, grant: Grant) -> None:
        """Add the units that Redis has granted in the answer to a call.

        An answer to a call of an earlier epoch is ignored, because Redis may have lost the grant.
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
