"""Limits counted in Redis, shared by all workers and gateways.

Each tenant has a Redis key ``limits:{<tenant>}``, and a tenant with budgets also has a key
``budgets:{<tenant>}``. `script.lua` describes the values of these keys.

Redis grants some units (requests, tokens and slots) of a tenant's limits to this process in
advance; `lease` describes this. A request that needs no more than these spare units is admitted
without a call to Redis. All other requests wait for a call. Each tenant has at most one call in
flight; requests that arrive meanwhile share the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile

from gateway.tenancy.limits.budgets import BudgetReport, BudgetTotal
from gateway.tenancy.limits.caller import Answer, ScriptCaller
from gateway.tenancy.limits.lease import TICK_S, Lease
from gateway.tenancy.limits.request import (
    SLOTS,
    TOKENS,
    Decision,
    LimitRequest,
    Settlement,
    Spending,
    units_of_request,
)
from gateway.tenancy.limits.script import ScriptCall, parse_grant, parse_reports

log = logging.getLogger(__name__)

# Default timeout of each read. Redis usually answers in less than a millisecond, but pauses while
# it forks for a snapshot.
TIMEOUT_S = 0.25
_LATE_LOG_INTERVAL_S = 60.0
_MAX_QUEUED_REQUESTS = 64
"""Maximum number of waiting requests, besides the first, for which one call asks for units."""

# Even if a limit is exhausted, other gateways may still hold spare units. Gateways give back the
# spare units that they do not need within this many seconds. A request is therefore retried for
# this time before it is refused.
_RETURN_WAIT_S = TICK_S + 0.15
_RETURN_POLL_INTERVAL_S = 0.05


class _Pending:
    """A request that waits for a call to Redis.

    Attributes:
        request: the request.
        answer: future for the decision; its result is None if Redis fails.
        refusal: decision with which the request will be refused unless other gateways give units
            back soon; None if Redis has not refused the request.
        until: time at which the request is refused even if other gateways may still give units
            back, in seconds of the event loop's clock.
    """

    __slots__ = ("answer", "refusal", "request", "until")

    def __init__(
        self, request: LimitRequest, answer: asyncio.Future[Decision | None], until: float
    ) -> None:
        self.request = request
        self.answer = answer
        self.refusal: Decision | None = None
        self.until = until

    def set_answer(self, decision: Decision | None) -> None:
        """Set the answer, unless the request was cancelled."""
        if not self.answer.done():
            self.answer.set_result(decision)


class _Account:
    """The lease of a tenant, and the tenant's requests that wait for a call to Redis."""

    __slots__ = ("is_polling", "lease", "waiting")

    def __init__(self, lease: Lease) -> None:
        self.lease = lease
        self.waiting: deque[_Pending] = deque()
        self.is_polling = False
        """True while a timer runs that will ask Redis again about a refused request."""


class SharedLimits:
    """Limits in Redis. Use as an async context manager, on the event loop of the requests."""

    def __init__(
        self,
        url: str,
        on_up: Callable[[bool], None] = lambda up: None,
        *,
        timeout_s: float = TIMEOUT_S,
        on_refused: Callable[[], object] = lambda: None,
        on_budget: Callable[[BudgetReport], object] = lambda report: None,
        totals: Callable[[str], Sequence[BudgetTotal]] = lambda tenant: (),
    ) -> None:
        """Prepare the limits. Entering the context connects to Redis.

        Args:
            url: URL of Redis, in a form that `lora_store.redis_url` describes.
            on_up: called with the value of the property `up` when the value may have changed. The
                call may come from any thread.
            timeout_s: timeout of each read in seconds.
            on_refused: called, from a thread, when a tenant's key in Redis has an invalid value.
            on_budget: called on the event loop with each report of a budget's usage.
            totals: returns the known usage of a tenant's budgets, at which Redis continues if it
                has lost its data.

        Raises:
            ValueError: the URL is invalid.
        """
        # A request may have to wait for an earlier batch of calls, for redirections in a cluster,
        # or for a slow proxy. Its timeout is therefore longer than the timeout of one read.
        self._max_wait_s = 2 * timeout_s
        self._on_budget = on_budget
        self._totals = totals
        self._caller = ScriptCaller(
            url,
            timeout_s,
            on_up=on_up,
            on_refused=on_refused,
            on_answers=self._deliver,
            on_connected=self._restate,
        )
        self._log_late_at = 0.0
        self._accounts: dict[str, _Account] = {}
        self._active: set[_Account] = set()
        """Accounts of tenants that hold units, or whose usage must be reported to Redis."""

    async def __aenter__(self) -> SharedLimits:
        self._loop = asyncio.get_running_loop()
        await self._caller.start()
        self._ticks = self._loop.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Give back all spare units and report all usage to Redis. Wait for at most two seconds."""
        self._ticks.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticks
        for account in self._active:
            self._caller.submit(account.lease.call(is_last=True))
        await self._caller.close()

    @property
    def up(self) -> bool:
        """True while Redis answers in time. See `ScriptCaller.up`."""
        return self._caller.up

    def decide(self, request: LimitRequest) -> Decision | None:
        """Admit or refuse a request without asking Redis. Return None if Redis must be asked."""
        account = self._account(request.tenant)
        return None if account.waiting else account.lease.decide(request)

    async def take(self, request: LimitRequest) -> Decision | None:
        """Count the request if it fits all limits. Return None if Redis does not answer in time."""
        if (decision := self.decide(request)) is not None:
            return decision
        if not self.up:
            return None
        account = self._account(request.tenant)
        until = self._loop.time() + _RETURN_WAIT_S
        pending = _Pending(request, self._loop.create_future(), until)
        account.waiting.append(pending)
        self._submit_call(account)
        try:
            await self._wait(account, pending)
        except asyncio.CancelledError:
            if not pending.answer.cancel():  # the answer arrived just before the cancellation
                self._give_back(request, pending.answer.result())
            raise
        if not pending.answer.cancel():
            return pending.answer.result()
        if pending.refusal is not None:
            return pending.refusal
        self._caller.set_late(True)
        self._log_late()
        return None

    async def _wait(self, account: _Account, pending: _Pending) -> None:
        """Wait until the request is admitted or refused, or until a call to Redis takes too long.

        The timeout applies to each call of Redis, not to the request. One call can refuse only the
        first waiting request and equal requests directly behind it. Behind many different requests,
        a request may therefore wait for many calls. Redis is not slow in this case, so the request
        must not time out.
        """
        lease, left_s = account.lease, self._max_wait_s
        while left_s > 0:
            # Use asyncio.wait instead of asyncio.timeout: if the event loop was busy, asyncio.wait
            # still returns an answer that arrived meanwhile, even if the timeout has passed.
            await asyncio.wait([pending.answer], timeout=left_s)
            if pending.answer.done() or pending.refusal is not None:
                return
            waited_s = self._loop.time() - lease.called_at if lease.in_flight else 0.0
            left_s = self._max_wait_s - waited_s

    def settle(self, settlement: Settlement) -> None:
        """Give back units that a request has taken. Return without waiting for Redis.

        The tenant's next call reports the change to Redis.
        """
        account = self._account(settlement.request.tenant)
        account.lease.settle(settlement)
        if account.lease.is_urgent:
            self._submit_call(account)

    def spend(self, spending: Spending) -> None:
        """Count used tokens in the tenant's budgets. Return without waiting for Redis.

        Each call of Redis reports all tokens that the tenant has used in this process so far. No
        tokens are lost if a call fails, because the next call reports them again.
        """
        self._account(spending.tenant).lease.spend(spending)

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            lease = Lease(tenant, self._loop.time, lambda: self._caller.epoch, self._totals)
            account = self._accounts[tenant] = _Account(lease)
        self._active.add(account)
        return account

    def _give_back(self, request: LimitRequest, decision: Decision | None) -> None:
        """Give back the units of a request that was admitted just when it was cancelled."""
        if decision is not None and decision.refused is None:
            units = units_of_request(request).units
            tokens = request.tokens if TOKENS in units else 0
            slots = request.slots if SLOTS in units else 0
            self.settle(Settlement(request, released=tokens, slots=slots))

    def _submit_call(self, account: _Account) -> None:
        """Submit a call of Redis that reports usage, and asks for units for waiting requests.

        Do nothing while a call of the tenant is in flight, or while a timer runs that will ask
        Redis again about a refused request.
        """
        lease, waiting = account.lease, account.waiting
        while waiting and waiting[0].answer.done():
            waiting.popleft()
        if lease.in_flight:
            return
        if account.is_polling and waiting and waiting[0].refusal is not None:
            return
        head = waiting[0].request if waiting else None
        queued = [pending.request for pending in islice(waiting, 1, 1 + _MAX_QUEUED_REQUESTS)]
        call = lease.call(head, queued)
        if not self._caller.submit(call):
            self._fail_waiting(account)

    def _fail_waiting(self, account: _Account) -> None:
        account.lease.lose()
        while account.waiting:
            account.waiting.popleft().set_answer(None)

    def _deliver(self, answers: Sequence[Answer]) -> None:
        self._caller.set_late(False)
        for call, numbers in answers:
            account = self._accounts[call.tenant]
            if numbers is None:
                self._fail_waiting(account)
                continue
            for report in parse_reports(call, numbers):
                self._on_budget(report)
            self._apply(account, call, numbers)

    def _apply(self, account: _Account, call: ScriptCall, numbers: Sequence[int]) -> None:
        grant, lease, waiting = parse_grant(call, numbers), account.lease, account.waiting
        lease.apply(call, grant)
        if call.head is not None and grant.refused is not None:
            refusal = lease.build_refusal(call.head, grant)
            self._refuse(account, call.head, refusal, may_return=grant.may_return)
        while waiting:
            if not waiting[0].answer.done():
                decision = lease.decide(waiting[0].request)
                if decision is None:
                    break
                waiting[0].set_answer(decision)
            waiting.popleft()
        if waiting or lease.is_urgent or lease.has_surplus:
            self._submit_call(account)

    def _refuse(
        self, account: _Account, request: LimitRequest, refusal: Decision, *, may_return: bool
    ) -> None:
        """Refuse the first waiting request, and the equal requests directly behind it.

        If `may_return` is True, ask Redis again for a short time before refusing the requests.

        Args:
            account: the tenant's account.
            request: the request that Redis has refused.
            refusal: the decision that the refused requests get.
            may_return: True if Redis can admit the request as soon as other gateways give back
                their spare units.
        """
        waiting, now = account.waiting, self._loop.time()
        same = takewhile(lambda one: one.answer.done() or one.request == request, waiting)
        for pending in [*same]:
            if not may_return or now >= pending.until:
                pending.set_answer(refusal)
            else:
                pending.refusal = refusal
        while waiting and waiting[0].answer.done():
            waiting.popleft()
        if may_return and waiting and not account.is_polling:
            account.is_polling = True
            self._loop.call_later(_RETURN_POLL_INTERVAL_S, self._poll, account)

    def _poll(self, account: _Account) -> None:
        account.is_polling = False
        self._submit_call(account)

    async def _tick(self) -> None:
        """Report usage to Redis, and give back spare units that are not needed.

        Run until cancelled.
        """
        while True:
            await asyncio.sleep(TICK_S)
            try:
                for account in [*self._active]:
                    is_due = account.lease.tick()
                    if is_due and self.up:
                        self._submit_call(account)
                    elif account.lease.is_idle:
                        self._active.discard(account)
            except Exception:  # do not end the task: the limits of all tenants depend on it
                log.exception("what was used of limits could not be reported")

    def _restate(self) -> None:
        """Report the usage of all tenants to Redis. Called after each new connection.

        The counts in Redis may be wrong: Redis may have lost its data, or may still count units of
        requests that have ended meanwhile. The reports correct them.
        """
        for account in self._active:
            account.lease.restate()
            self._submit_call(account)

    def _log_late(self) -> None:
        now = self._loop.time()
        if now >= self._log_late_at:
            self._log_late_at = now + _LATE_LOG_INTERVAL_S
            log.warning(
                "Redis has not answered within %g s; limits of such requests are counted as "
                "when_redis_is_away says",
                self._max_wait_s,
            )
