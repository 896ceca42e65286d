"""Limits, per tenant, on concurrent reads of stored responses and conversations.

The tenant's limits per minute do not count reads and deletions. The size of a record is unknown
until the record is read. So a tenant has only a few slots for reads and deletions, and each of
these operations takes one slot. The number of requests that may wait for a slot is limited, too.
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
    """The slots for reads of stored data by one tenant in this process.

    Acquire a slot with `async with` for the time of a read or deletion.
    """

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(_LOOKUP_SLOTS)
        """Semaphore of the slots.

        Streams of background responses also read the store. They acquire this semaphore without
        calling `__aenter__`, so `_MAX_WAITING_LOOKUPS` does not limit them. The number of such
        streams has its own limit.
        """
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
        # Never remove a tenant's `TenantLookups`: a running stream may still hold one of its slots.
        # Memory stays bounded, as the configuration bounds the number of tenants.
        self._by_tenant: defaultdict[str, TenantLookups] = defaultdict(TenantLookups)

    def for_tenant(self, tenant: str) -> TenantLookups:
        return self._by_tenant[tenant]


@dataclass(frozen=True, slots=True)
class StoredLookup:
    """The objects that an endpoint needs to read a tenant's stored responses and conversations.

    Attributes:
        conversations: The store.
        tenant: The tenant's name; "" without tenants.
        intake: The request's intake, which runs expensive work in threads.
        slot: Context manager that holds one of the tenant's slots. Enter it to read data of unknown
            size.
    """

    conversations: Conversations
    tenant: str
    intake: Intake
    slot: TenantLookups


@asynccontextmanager
async def open_lookup(request: Request, *, counted: bool = False) -> AsyncIterator[StoredLookup]:
    """Authenticate the client of an endpoint, and yield a `StoredLookup` for the client's tenant.

    If `counted`, the request counts toward the tenant's request limits.

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
    """Return a `StoredLookup` for a request that is already authenticated and has an intake."""
    service = service_of(request.scope)
    read_limiter: TenantReadLimiter = request.app.state.read_limiter
    name = tenant.name if tenant else ""
    return StoredLookup(service.conversations, name, intake, read_limiter.for_tenant(name))
