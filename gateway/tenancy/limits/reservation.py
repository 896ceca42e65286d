"""Reservation: the slots and tokens of a tenant's limits that one request holds while it runs."""

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

# Used tokens of a running request are recorded in steps of at least this size. A crash of the
# process therefore loses fewer than this number of used tokens per running request.
_RECORD_STEP_TOKENS = 32


class LimitCounter(Protocol):
    """Counter of limits, in Redis or in this process."""

    def settle(self, settlement: Settlement) -> None:
        """Count used tokens, and give back tokens and slots. Return without waiting for Redis."""


class CountedRequest(NamedTuple):
    """A request, the decision to admit or refuse it, and the counter that decided."""

    request: LimitRequest
    decision: Decision
    counter: LimitCounter


class Ledger(Protocol):
    """The methods of `Limits` that a reservation calls."""

    async def take(self, request: LimitRequest) -> CountedRequest:
        """Count a request if its limits allow it, and return the decision.

        Raise LimitsUnavailable if a limit cannot be counted now.
        """

    def spend(self, tenant: Tenant, tokens: int) -> None:
        """Count used tokens in the tenant's budgets. Return without waiting for Redis."""

    def build_refusal(
        self, taken: CountedRequest, limit: LimitName, quotas: Mapping[str, Quota]
    ) -> RateLimited:
        """Return the error for a refused request."""


class _ReservedTokens(NamedTuple):
    """Reserved tokens of one counted request that are not yet recorded as used."""

    counter: LimitCounter
    request: LimitRequest
    tokens: int


class Reservation:
    """Slots and tokens of a tenant's limits that one request holds, as a context manager.

    At the end of the context, the slots and tokens are given back, unless `detach` was called.
    `quotas` has the usage of the tenant's limits, by name of the limit. The usage includes this
    request.

    Reserved tokens count in the limits until they are recorded as used or given back. Generated
    tokens are recorded as used in steps of at least 32. If no response generates more tokens than
    were reserved for it, the tenant never exceeds a budget, and never exceeds a limit per minute in
    any 60 seconds.
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
        """Leave the reservation open when the context ends. The caller must then call `close`."""
        self._is_detached = True

    @property
    def counts_tokens(self) -> bool:
        """True if tokens are reserved in a limit of the tenant."""
        return bool(self._reserved)

    async def take(self, request: LimitRequest) -> None:
        """Count a request in its limits, and hold its slots and tokens.

        Raises:
            RateLimited: a limit is reached.
            LimitsUnavailable: a limit cannot be counted now.
        """
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
        """Take further slots of `concurrent_requests`. Raise the same errors as `take`."""
        tenant = self._tenant
        if slots and tenant is not None and tenant.slot_limits:
            await self.take(
                LimitRequest(tenant=tenant.name, limits=tenant.slot_limits, slots=slots)
            )

    async def reserve(self, tokens: int) -> None:
        """Reserve tokens for prompt and response. Raise the same errors as `take`."""
        if self._tenant is not None and self._tenant.token_limits:
            await self.take(_build_token_request(self._tenant, tokens))

    async def extend(self, tokens: int) -> bool:
        """Reserve further tokens for the response. Return False if a limit refuses them.

        Return True if a limit cannot be counted now: an admitted request may then continue.
        """
        assert self._tenant is not None
        try:
            taken = await self._ledger.take(_build_token_request(self._tenant, tokens))
        except LimitsUnavailable:
            return True
        if taken.decision.refused is not None:
            return False
        if taken.request.limits:
            self._hold(taken)
            if self._closed:
                self._release()
        return True

    def remaining_tokens(self, used: int) -> int:
        """Return the number of unused reserved tokens.

        `used` is the number of tokens that the request has used so far.
        """
        return sum([held.tokens for held in self._reserved]) - (used - self._recorded)

    def record_used(self, used: int) -> None:
        """Record that the request has used `used` tokens so far. Call this while the request runs.

        The used tokens are no longer counted as reserved; the unused tokens remain reserved. Do
        nothing if fewer than 32 tokens were used since the last recording.
        """
        if self._reserved and used - self._recorded >= _RECORD_STEP_TOKENS:
            last, left = self._reserved[-1], max(0, self.remaining_tokens(used))
            self._release(used - self._recorded, still_held=left)
            self._reserved = [last._replace(tokens=left)]
            self._recorded = used

    def close(self, used: int) -> None:
        """End the reservation, and give back its slots and unused tokens. Call this once.

        `used` is the total number of tokens used by the request.
        """
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
        """Count some of the reserved tokens as used, and give the others back.

        Args:
            used: number of tokens that count as used from now on.
            still_held: number of tokens that remain reserved.
            slots: number of slots to give back at the same time.
        """
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
