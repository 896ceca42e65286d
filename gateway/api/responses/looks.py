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

from gateway.api.auth import authenticate_tenant
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
        """Taken alone by streams that poll, of which no tenant has many."""
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


class Looks:
    """One for each process. A look ends when it is known how large what was read is."""

    def __init__(self) -> None:
        # Never removed: a stream that polls holds the slots alone, so a weak reference to their
        # owner would give the next request slots of its own. No more tenants come here than the
        # configuration has had.
        self._of: defaultdict[str, TenantLookups] = defaultdict(TenantLookups)

    def of(self, tenant: str) -> TenantLookups:
        return self._of[tenant]


@dataclass(frozen=True, slots=True)
class Asking:
    """A request about what is kept.

    Attributes:
        tenant: whose it is, "" where there are none.
        intake: where that is done which takes time.
        look: to be held while it is not known how large what is read is.
    """

    kept: Conversations
    tenant: str
    intake: Intake
    look: TenantLookups


@asynccontextmanager
async def asking(request: Request, *, counted: bool = False) -> AsyncIterator[Asking]:
    """For one endpoint's work. `counted` is what counts among the requests of its tenant's limits.

    Raises InvalidKey and RateLimited.
    """
    tenant = authenticate_tenant(request)
    service = service_of(request.scope)
    async with Intake(request, tenant) as intake:
        with await service.accounting.count(tenant) if counted else nullcontext():
            yield asked_by(request, tenant, intake)


def asked_by(request: Request, tenant: Tenant | None, intake: Intake) -> Asking:
    """For a request that is taken in already."""
    service = service_of(request.scope)
    looks: Looks = request.app.state.looks
    name = tenant.name if tenant else ""
    return Asking(service.conversations, name, intake, looks.of(name))
