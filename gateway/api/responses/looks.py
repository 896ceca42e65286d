"""Limits on concurrent lookups of stored data per tenant: sizes are unknown until a record is read.

Lookups and deletions count toward no per-minute limit, so this bounds their cost: each uses one of
the tenant's slots, and few may wait for a slot.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType

from fastapi import Request

from gateway.api.auth import authenticate_tenant
from gateway.api.intake import Intake
from gateway.api.request_log import service_of
from gateway.config.tenants import Tenant
from gateway.conversations.store import Conversations
from gateway.errors import Overloaded

_LOOKUP_SLOTS = 4
_MAX_WAITING_LOOKUPS = 256


class TenantLookups:
    """The lookup slots of one tenant in this process. Enter the object for one lookup."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(_LOOKUP_SLOTS)
        """Used directly by streams that poll, which have their own limit."""
        self._waiting = 0

    async def __aenter__(self) -> None:
        """Raise Overloaded if too many lookups of the tenant already wait."""
        if self._waiting >= _MAX_WAITING_LOOKUPS:
            raise Overloaded(
                f"{self._waiting} lookups and deletions of stored responses and conversations of "
                f"this key wait at this worker; allowed: {_MAX_WAITING_LOOKUPS}. Try again when "
                "some have ended."
            )
        self._waiting += 1
        try:
            await self.slots.acquire()
        finally:
            self._waiting -= 1

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.slots.release()


class TenantReadLimiter:
    """Lookup slots by tenant, one instance per process. A slot is released once the size is
    known."""

    def __init__(self) -> None:
        # Never removed: streams may still use the slots. The number of tenants is bounded by the
        # configuration.
        self._by_tenant: defaultdict[str, TenantLookups] = defaultdict(TenantLookups)

    def for_tenant(self, tenant: str) -> TenantLookups:
        return self._by_tenant[tenant]


@dataclass(frozen=True, slots=True)
class StoredLookup:
    """A request for stored data.

    Attributes:
        conversations: The store.
        tenant: The tenant's name; "" without tenants.
        intake: Runs expensive work in threads.
        slot: Held while the size of the data is unknown.
    """

    conversations: Conversations
    tenant: str
    intake: Intake
    slot: TenantLookups


@asynccontextmanager
async def open_lookup(request: Request, *, counted: bool = False) -> AsyncIterator[StoredLookup]:
    """Open a lookup for one endpoint call. `counted` requests count toward the tenant's request
    limits.

    Raises:
        InvalidKey: The request's key is unknown.
        RateLimited: A limit of the tenant is reached.
    """
    tenant = authenticate_tenant(request)
    service = service_of(request.scope)
    async with Intake(request, tenant) as intake:
        with await service.accounting.count(tenant) if counted else nullcontext():
            yield make_lookup(request, tenant, intake)


def make_lookup(request: Request, tenant: Tenant | None, intake: Intake) -> StoredLookup:
    """Make the lookup of a request whose intake already exists."""
    service = service_of(request.scope)
    read_limiter: TenantReadLimiter = request.app.state.read_limiter
    name = tenant.name if tenant else ""
    return StoredLookup(service.conversations, name, intake, read_limiter.for_tenant(name))
