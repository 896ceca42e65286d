"""Units of its tenant's limits that one request holds, from its admission until its answer ends."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Protocol

from gateway.config.limits import LimitName
from gateway.config.tenants import Tenant
from gateway.errors import LimitsUnavailable, Quota, RateLimited
from gateway.tenancy.limits.request import (
    SLOTS,
    TOKENS,
    Decision,
    LimitRequest,
    Settlement,
    units_of_request,
)

# Used tokens are recorded in steps of this size: a process that dies loses the rest.
_RECORD_STEP_TOKENS = 32


class LimitCounter(Protocol):
    """Counter of limits: Redis, or this process."""

    def settle(self, settlement: Settlement) -> None:
        """Give units back. Returns at once."""


class CountedRequest(NamedTuple):
    """A counter's decision on a request."""

    request: LimitRequest
    decision: Decision
    counter: LimitCounter


class Ledger(Protocol):
    """The limits, as a reservation needs them."""

    async def take(self, request: LimitRequest) -> CountedRequest:
        """Count a request and return the decision. Raise LimitsUnavailable."""

    def spend(self, tenant: Tenant, tokens: int) -> None:
        """Count tokens of the tenant's budgets. Returns at once."""

    def build_refusal(
        self, taken: CountedRequest, limit: LimitName, quotas: Mapping[str, Quota]
    ) -> RateLimited:
        """Return the error for a refused request."""


class _ReservedTokens(NamedTuple):
    """Tokens that are reserved and not used yet."""

    counter: LimitCounter
    request: LimitRequest
    tokens: int


class Reservation:
    """Slots and tokens of one request. A `with` gives them back at its end, unless it is detached.

    `quotas` are the tenant's limits, by name, with this request counted.

    A reservation counts in full as long as it may still be used. Used tokens count from when they
    are recorded, a few tokens later. So if answers stay within their reservation, no 60 seconds
    have more tokens than the limit, and no day or month more than the budget.
    """

    def __init__(self, ledger: Ledger, tenant: Tenant | None) -> None:
        self.quotas: dict[str, Quota] = {}
        self._ledger = ledger
        self._tenant = tenant
        self._slots: list[CountedRequest] = []
        self._reserved: list[_ReservedTokens] = []
        self._recorded = 0
        self._is_detached = False
        self._closed = False

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._is_detached:
            self.close(0)

    def detach(self) -> None:
        """Leave the reservation open at the end of the `with`; the caller must close it."""
        self._is_detached = True

    @property
    def counts_tokens(self) -> bool:
        """True if tokens are reserved."""
        return bool(self._reserved)

    async def take(self, request: LimitRequest) -> None:
        """Count a request and hold its units. Raise RateLimited or LimitsUnavailable."""
        taken = await self._ledger.take(request)
        self.quotas |= taken.decision.quotas
        if taken.decision.refused is not None:
            raise self._ledger.build_refusal(taken, taken.decision.refused, self.quotas)
        units = units_of_request(taken.request).units
        if SLOTS in units:
            self._slots.append(taken)
        if TOKENS in units:
            self._hold(taken)

    async def take_slots(self, slots: int) -> None:
        """Take further slots of `concurrent_requests`. Raise RateLimited or LimitsUnavailable."""
        tenant = self._tenant
        if slots and tenant is not None and tenant.slot_limits:
            await self.take(
                LimitRequest(tenant=tenant.name, limits=tenant.slot_limits, slots=slots)
            )

    async def reserve(self, tokens: int) -> None:
        """Reserve tokens for the prompt and the answer. Raise RateLimited or LimitsUnavailable."""
        if self._tenant is not None and self._tenant.token_limits:
            await self.take(_build_token_request(self._tenant, tokens))

    async def extend(self, tokens: int) -> bool:
        """Return True if further tokens are reserved.

        Tokens that cannot be counted now are granted: an admitted request is not ended for that.
        """
        assert self._tenant is not None
        try:
            taken = await self._ledger.take(_build_token_request(self._tenant, tokens))
        except LimitsUnavailable:
            return True  # an admitted request is not ended for that
        if taken.decision.refused is not None:
            return False
        if taken.request.limits:
            self._hold(taken)
            if self._closed:
                self._release()
        return True

    def remaining_tokens(self, used: int) -> int:
        """Return the reserved tokens that are left when `used` tokens have been used in total."""
        return sum([held.tokens for held in self._reserved]) - (used - self._recorded)

    def record_used(self, used: int) -> None:
        """Record how many tokens have been used in total, which never decreases. Call this
        regularly.

        Used tokens count from now on as used, and the others remain reserved.
        """
        if self._reserved and used - self._recorded >= _RECORD_STEP_TOKENS:
            last, left = self._reserved[-1], max(0, self.remaining_tokens(used))
            self._release(used - self._recorded, still_held=left)
            self._reserved = [last._replace(tokens=left)]
            self._recorded = used

    def close(self, used: int) -> None:
        """End the reservation, with the total of tokens used. Call this once."""
        self._closed = True
        freed = 0
        for request, _, counter in self._slots:
            if self._reserved and self._reserved[-1].counter is counter:
                freed += request.slots
            else:
                counter.settle(Settlement(request, slots=request.slots))
        self._release(max(0, used - self._recorded), slots=freed)

    def _hold(self, taken: CountedRequest) -> None:
        self._reserved.append(_ReservedTokens(taken.counter, taken.request, taken.request.tokens))

    def _release(self, used: int = 0, still_held: int = 0, slots: int = 0) -> None:
        """Give back all reserved tokens: `used` count now, and `still_held` remain reserved."""
        if used and self._tenant is not None:
            self._ledger.spend(self._tenant, used)
        for counter, request, tokens in reversed(self._reserved):
            counter.settle(Settlement(request, tokens, used, still_held, slots))
            used = still_held = slots = 0
        self._reserved = []


def _build_token_request(tenant: Tenant, tokens: int) -> LimitRequest:
    return LimitRequest(
        tenant=tenant.name, limits=tenant.token_limits, budgets=tenant.budgets, tokens=tokens
    )
