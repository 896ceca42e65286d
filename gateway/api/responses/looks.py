"""Lookups of what is stored: of each tenant few at a time, as nobody knows how large it is.

Lookups and deletions count in no limit of a tenant's minute, so this bounds what they take: each
runs in one of the tenant's slots, and few wait for one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from types import TracebackType

from fastapi import Request

from gateway.api.auth import tenant_of
from gateway.api.intake import Intake
from gateway.api.request_log import service_of
from gateway.config.tenants import Tenant
from gateway.conversations.store import Conversations
from gateway.errors import Overloaded

_LOOKUP_SLOTS = 4
_MAX_WAITING_LOOKUPS = 256


class TenantLookups:
    """The lookup slots of one tenant in this process. Enter it for one lookup."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(_LOOKUP_SLOTS)
        """For streams that look again and again, which have a bound of their own."""
        self._waiting = 0

    async def __aenter__(self) -> None:
        """Raise Overloaded if too many wait already."""
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
    """One for each process. A look ends when it is known how large what was read is."""

    def __init__(self) -> None:
        # For good: streams that follow have the slots alone. There are no more tenants than the
        # configuration has had.
        self._by_tenant: defaultdict[str, TenantLookups] = defaultdict(TenantLookups)

    def for_tenant(self, tenant: str) -> TenantLookups:
        return self._by_tenant[tenant]


@dataclass(frozen=True, slots=True)
class StoredLookup:
    """A request about what is kept.

    Attributes:
        tenant: whose it is, "" where there are none.
        intake: where that is done which takes time.
        look: to be held while it is not known how large what is read is.
    """

    conversations: Conversations
    tenant: str
    intake: Intake
    slot: TenantLookups


@asynccontextmanager
async def open_lookup(request: Request, *, counted: bool = False) -> AsyncIterator[StoredLookup]:
    """For one endpoint's work. `counted` is what counts among the requests of its tenant's limits.

    Raises InvalidKey and RateLimited.
    """
    tenant = tenant_of(request)
    service = service_of(request.scope)
    async with Intake(request, tenant) as intake:
        with await service.accounting.count(tenant) if counted else nullcontext():
            yield make_lookup(request, tenant, intake)


def make_lookup(request: Request, tenant: Tenant | None, intake: Intake) -> StoredLookup:
    """For a request that is taken in already."""
    service = service_of(request.scope)
    read_limiter: TenantReadLimiter = request.app.state.read_limiter
    name = tenant.name if tenant else ""
    return StoredLookup(service.conversations, name, intake, read_limiter.for_tenant(name))
