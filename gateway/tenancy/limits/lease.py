"""One tenant's limits at this process: units that Redis granted it, and requests that they admit.

What a process may use counts as used in Redis until the process says otherwise, or its lease ends.
So a request that fits into the spare units is admitted by a few additions here. When it is counted
by the second, that is the second in which its use is reported: a later one, never an earlier one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from gateway.config.limits import LimitName
from gateway.errors import Quota
from gateway.tenancy.limits.demand import Demand
from gateway.tenancy.limits.request import (
    PLACES,
    REQUESTS,
    TOKENS,
    UNITS,
    WINDOW_S,
    Decision,
    LimitRequest,
    Settlement,
    Spending,
    kinds_of,
)
from gateway.tenancy.limits.script import Call, Grant

LEASE_S = 15.0
TICK_S = 0.25
_RENEW_S = 5.0
_REPORT_S = 1.0
"""The longest time until Redis hears of a request, in seconds, if its tenant sends no more."""
_MAX_REFUSED_S = 1.0
"""How long a refusal stands without another look: somebody may empty Redis."""


def _units(request: LimitRequest) -> tuple[int, int, int]:
    return request.requests, request.tokens, request.places


class Lease:
    """The units of one tenant. It belongs to one thread, and one call is under way at a time.

    Attributes:
        in_flight: whether an answer to the last call is awaited.
        called_at: when the last call was made, in seconds of the clock.
        is_urgent: whether others may wait for what the next call gives back.
    """

    def __init__(
        self, tenant: str, clock: Callable[[], float], epoch: Callable[[], int] = lambda: 0
    ) -> None:
        """Hold nothing yet.

        Args:
            tenant: its name.
            clock: the monotonic time in seconds.
            epoch: a number that changes when Redis may have lost what it granted.
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
        """The budgets of the last spending, which are among `_budgets`."""
        self._spare, self._shares = [0, 0, 0], [0, 0, 0]
        self._held = [0, 0, 0]
        self._used, self._known = [0, 0], [0, 0]
        self._spent = self._spent_known = 0
        self._demands = (Demand(), Demand(), Demand())
        self._quotas: Mapping[LimitName, Quota] = {}
        self._refusal: tuple[LimitRequest, Decision] | None = None
        self._offset_ms = 0
        self._is_calm = False
        self._changed = False
        self._due_at = 0.0
        self.called_at = 0.0

    def decide(self, request: LimitRequest) -> Decision | None:
        """Admit or refuse a request by what is known here; None if Redis must be asked."""
        limits, units, spare, known = request.limits, _units(request), self._spare, self._quotas
        kinds = kinds_of(request)
        for name, unit, _ in kinds.limits:
            quota = known.get(name)
            if quota is None or units[unit] > spare[unit] or quota.limit != limits[name]:
                return self._refused_again(request) if self._refusal else None
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
        self._change(now + _REPORT_S)
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

    def refusal(self, request: LimitRequest, grant: Grant) -> Decision:
        """Return the refusal that a call was answered with, and remember one that stands."""
        quotas: dict[str, Quota] = {}
        for name, unit, is_budget in kinds_of(request).limits:
            quota, spare = grant.quotas[name], self._spare[unit]
            if is_budget:
                quotas[name] = quota._replace(held=quota.held - spare)
            else:
                quotas[name] = quota._replace(used=quota.used - spare)
        decision = Decision(grant.refused, grant.wait_ms, quotas, grant.now_ms)
        # Requests are never given back: without spare ones, none is admitted before then.
        if grant.refused == "requests_per_minute" and not grant.may_return and grant.wait_ms > 0:
            self._refusal = request, decision
        return decision

    def _refused_again(self, request: LimitRequest) -> Decision | None:
        assert self._refusal is not None
        same, (refused, wait_ms, quotas, at_ms) = self._refusal
        now_ms = round(self._clock() * 1000) + self._offset_ms
        age_ms = now_ms - at_ms
        if age_ms >= min(wait_ms, _MAX_REFUSED_S * 1000) or self._epoch != self._now_epoch():
            self._refusal = None
            return None
        if request != same:
            return None
        aged = {n: q._replace(reset_ms=max(0, q.reset_ms - age_ms)) for n, q in quotas.items()}
        return Decision(refused, wait_ms - age_ms, aged, now_ms)

    def settle(self, settlement: Settlement) -> None:
        _, released, used, kept, places = settlement
        freed = [0, 0, places]
        if released or used or kept:
            self._held[TOKENS] += kept - released
            self._used[TOKENS] += used
            freed[TOKENS] = max(0, released - kept - used)
        self._held[PLACES] -= places
        now = self._clock()
        # Near a limit, or beyond a lowered one, it is Redis that gives them to others.
        may_reuse = self._is_covered(now) and self._is_calm
        for unit in (TOKENS, PLACES):
            self._demands[unit].give_back(freed[unit])
            if may_reuse:
                self._spare[unit] += freed[unit]
        if not any(freed):
            self._change(now + _RENEW_S)
            return
        self._change(now)
        if not self._is_calm:
            self.is_urgent = True

    def spend(self, spending: Spending) -> None:
        if spending.budgets is not self._known_budgets:
            # Never fewer: what began before a budget was added must not leave that one out.
            self._budgets = {**self._budgets, **spending.budgets}
            self._known_budgets = spending.budgets
        self._spent += spending.tokens
        self._change(self._clock() + _RENEW_S)

    def _change(self, due_at: float) -> None:
        """Take note that Redis must hear of something by then."""
        self._due_at = min(self._due_at, due_at) if self._changed else due_at
        self._changed = True

    def _look_for_room(self) -> None:
        """Note whether each limit has enough left that no request waits for what is given back."""
        units = {UNITS[name] for name in self._limits}
        self._is_calm = all(self._shares[unit] >= self._demands[unit].floor for unit in units)

    def _is_covered(self, now: float) -> bool:
        """Return True while Redis counts what is spare here; otherwise forget it."""
        if now < self._valid_until and self._epoch == self._now_epoch():
            return True
        self._spare = [0, 0, 0]
        return False

    @property
    def has_surplus(self) -> bool:
        """True if spare units serve nobody here and may be wanted elsewhere."""
        if self._is_calm:
            return False
        bounds = zip(self._spare, self._demands, self._shares, strict=True)
        return any(spare > min(demand.wish, share) for spare, demand, share in bounds)

    @property
    def is_idle(self) -> bool:
        """Return True if Redis has every report, and counts nothing for this process."""
        return not (self._changed or self.in_flight or any(self._held) or any(self._spare))

    def tick(self) -> bool:
        """Take note that TICK_S has passed. Return True if a call is due."""
        for demand in self._demands:
            demand.roll()
        self._look_for_room()
        now = self._clock()
        if any(self._spare) or (self._changed and now >= self._due_at):
            return True
        return any(self._held) and now - self.called_at >= _RENEW_S

    def lose(self) -> None:
        """Take note that a call has no answer, so that it may have been executed or not."""
        self.in_flight = False
        self._change(0.0)

    def restate(self) -> None:
        """Take note that Redis may have forgotten all."""
        self._change(0.0)

    def call(
        self,
        head: LimitRequest | None = None,
        queued: Iterable[LimitRequest] = (),
        *,
        is_last: bool = False,
    ) -> Call:
        """Return what to ask Redis. Until the answer comes, only the lease admits requests.

        Args:
            head: the first request that waits.
            queued: some that wait behind it.
            is_last: give up all that is spare, since the process ends.
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
            for unit in kinds_of(request).units:
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
        return Call(
            tenant=self.tenant,
            state={name: [*v] if isinstance(v, list) else v for name, v in state.items()},
            limits=dict(self._limits),
            budgets=self._budgets,
            used=(*self._used,),
            spent=self._spent,
            keep=(*self._spare,),
            head=head,
            epoch=self._now_epoch(),
            sent_at=now,
        )

    def _learn_limits(self, request: LimitRequest) -> None:
        """Replace what is known of the limits on the units that a request takes."""
        taken = kinds_of(request).units
        others = {n: limit for n, limit in self._limits.items() if UNITS[n] not in taken}
        self._limits = {**request.limits, **others}
        self._budgets = {**self._budgets, **request.budgets}

    def apply(self, call: Call, grant: Grant) -> None:
        """Take what was granted; an answer of an earlier epoch says nothing of the present one."""
        self.in_flight = False
        if call.epoch != self._now_epoch():
            self._change(0.0)
            return
        self._known = [max(pair) for pair in zip(self._known, call.used, strict=True)]
        self._spent_known = max(self._spent_known, call.spent)
        self._offset_ms = grant.now_ms - round(self._clock() * 1000)
        self._quotas, self._shares = grant.quotas, [*grant.shares]
        self._epoch, self._valid_until = call.epoch, call.sent_at + LEASE_S
        for unit, units in enumerate(grant.granted):
            self._spare[unit] += units
        self._look_for_room()
