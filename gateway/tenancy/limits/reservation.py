"""What one request holds of its tenant's limits, from when it is counted until its answer ends."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Protocol

from gateway.config.limits import LimitName
from gateway.config.tenants import Tenant
from gateway.errors import LimitsUnavailable, Quota, RateLimited
from gateway.tenancy.limits.request import (
    PLACES,
    TOKENS,
    Decision,
    LimitRequest,
    Settlement,
    kinds_of,
)

# Tokens that an answer uses are booked in steps of so many: a process that dies loses the rest.
_STEP = 32


class Counter(Protocol):
    """Where limits are counted: in Redis, or here."""

    def settle(self, settlement: Settlement) -> None:
        """Returns at once."""


class Taken(NamedTuple):
    """What a counter said of a request."""

    request: LimitRequest
    decision: Decision
    counter: Counter


class Ledger(Protocol):
    """The limits, as a reservation needs them."""

    async def take(self, request: LimitRequest) -> Taken:
        """Raises LimitsUnavailable."""

    def spend(self, tenant: Tenant, tokens: int) -> None:
        """So many of its budgets, which are counted wherever a request is. Returns at once."""

    def refuse(self, taken: Taken, limit: LimitName, quotas: Mapping[str, Quota]) -> RateLimited:
        """The failure of what was not taken."""


class _Held(NamedTuple):
    """Tokens reserved and not used yet."""

    counter: Counter
    request: LimitRequest
    tokens: int


class Reservation:
    """Places and tokens. In a `with` it is given back at the end, unless somebody keeps it.

    `quotas` are the tenant's limits, by name, with this request counted.

    All that is reserved counts as long as it may still be used, and what is used from when it is
    booked, a few tokens later. So where answers stay within what is reserved for
    them, no 60 seconds have more tokens than the limit, and no day or month more than the budget.
    """

    def __init__(self, ledger: Ledger, tenant: Tenant | None) -> None:
        self.quotas: dict[str, Quota] = {}
        self._ledger = ledger
        self._tenant = tenant
        self._places: list[Taken] = []
        self._held: list[_Held] = []
        self._booked = 0
        self._kept = False
        self._closed = False

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._kept:
            self.close(0)

    def keep(self) -> None:
        """Whoever says so closes it."""
        self._kept = True

    @property
    def counts_tokens(self) -> bool:
        return bool(self._held)

    async def take(self, request: LimitRequest) -> None:
        """Raises RateLimited and LimitsUnavailable."""
        taken = await self._ledger.take(request)
        self.quotas |= taken.decision.quotas
        if taken.decision.refused is not None:
            raise self._ledger.refuse(taken, taken.decision.refused, self.quotas)
        units = kinds_of(taken.request).units
        if PLACES in units:
            self._places.append(taken)
        if TOKENS in units:
            self._hold(taken)

    async def take_more(self, places: int) -> None:
        """Of `concurrent_requests`. Raises RateLimited and LimitsUnavailable."""
        tenant = self._tenant
        if places and tenant is not None and tenant.place_limits:
            await self.take(
                LimitRequest(tenant=tenant.name, limits=tenant.place_limits, places=places)
            )

    async def reserve(self, tokens: int) -> None:
        """For the prompt and the answer. Raises RateLimited and LimitsUnavailable."""
        if self._tenant is not None and self._tenant.token_limits:
            await self.take(_of_tokens(self._tenant, tokens))

    async def extend(self, tokens: int) -> bool:
        """Whether so many more could be reserved; where they cannot be counted now, they are."""
        assert self._tenant is not None
        try:
            taken = await self._ledger.take(_of_tokens(self._tenant, tokens))
        except LimitsUnavailable:
            return True  # whoever is let in is not turned out for that
        if taken.decision.refused is not None:
            return False
        if taken.request.limits:
            self._hold(taken)
            if self._closed:
                self._release()
        return True

    def left(self, used: int) -> int:
        """Of what was reserved, when `used` tokens have been used in all."""
        return sum([held.tokens for held in self._held]) - (used - self._booked)

    def book(self, used: int) -> None:
        """To be told now and then how many tokens have been used in all; never fewer than before.

        What was used counts now, and what is left is held from now on.
        """
        if self._held and used - self._booked >= _STEP:
            last, left = self._held[-1], max(0, self.left(used))
            self._release(used - self._booked, kept=left)
            self._held = [last._replace(tokens=left)]
            self._booked = used

    def close(self, used: int) -> None:
        """The request has ended and used so many tokens in all. To be called once."""
        self._closed = True
        freed = 0
        for request, _, counter in self._places:
            if self._held and self._held[-1].counter is counter:
                freed += request.places
            else:
                counter.settle(Settlement(request, places=request.places))
        self._release(max(0, used - self._booked), places=freed)

    def _hold(self, taken: Taken) -> None:
        self._held.append(_Held(taken.counter, taken.request, taken.request.tokens))

    def _release(self, used: int = 0, kept: int = 0, places: int = 0) -> None:
        """Gives back all that is held. `used` tokens count now, `kept` are held on."""
        if used and self._tenant is not None:
            self._ledger.spend(self._tenant, used)
        for counter, request, tokens in reversed(self._held):
            counter.settle(Settlement(request, tokens, used, kept, places))
            used = kept = places = 0
        self._held = []


def _of_tokens(tenant: Tenant, tokens: int) -> LimitRequest:
    return LimitRequest(
        tenant=tenant.name, limits=tenant.token_limits, budgets=tenant.budgets, tokens=tokens
    )
