"""Limits, per tenant, on concurrent lookups of stored data.

The size of a record is unknown until the record is read, so a tenant may read only a few at once.
No per-minute limit counts lookups and deletions. Instead, each uses one of the tenant's slots, and
the number that may wait for a slot is limited.
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
    """The lookup slots of one tenant in this process. Use `async with` around each lookup."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(_LOOKUP_SLOTS)
        """The free slots. Polling streams acquire a slot here directly, and so are not limited like
        waiting lookups: the number of streams has its own limit."""
        self._waiting = 0

    async def __aenter__(self) -> None:
        """Acquire a slot. Raise Overloaded if too many lookups of the tenant already wait."""
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
    """The lookup slots of all tenants; one instance per process."""

    def __init__(self) -> None:
        # Tenants are never removed, as streams may still use their slots. The configuration
        # bounds the number of tenants.
        self._by_tenant: defaultdict[str, TenantLookups] = defaultdict(TenantLookups)

    def for_tenant(self, tenant: str) -> TenantLookups:
        return self._by_tenant[tenant]


@dataclass(frozen=True, slots=True)
class StoredLookup:
    """A request for stored data.

    Attributes:
        conversations: The store.
        tenant: The tenant's name; "" without tenants.
        intake: The request's intake, which runs expensive work in threads.
        slot: The tenant's lookup slots, to be entered while data of unknown size is read.
    """

    conversations: Conversations
    tenant: str
    intake: Intake
    slot: TenantLookups


@asynccontextmanager
async def open_lookup(request: Request, *, counted: bool = False) -> AsyncIterator[StoredLookup]:
    """Yield the lookup of one endpoint call. If `counted`, the request counts toward the tenant's
    request limits.

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
    """Return the lookup of a request whose intake already exists."""
    service = service_of(request.scope)
    read_limiter: TenantReadLimiter = request.app.state.read_limiter
    name = tenant.name if tenant else ""
    return StoredLookup(service.conversations, name, intake, read_limiter.for_tenant(name))
