"""Who looks at what is kept: of each tenant few at a time, as nobody knows how large it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from weakref import WeakValueDictionary

from fastapi import Request

from gateway.api.auth import tenant_of
from gateway.api.intake import Intake
from gateway.api.request_log import service_of
from gateway.config.tenants import Tenant
from gateway.conversations.store import Conversations

_AT_ONCE = 4


class Looks:
    """One for each process. A look ends when it is known how large what was read is."""

    def __init__(self) -> None:
        self._of: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, tenant: str) -> asyncio.Semaphore:
        found = self._of.get(tenant)
        if found is None:
            found = self._of[tenant] = asyncio.Semaphore(_AT_ONCE)
        return found


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
    look: asyncio.Semaphore


@asynccontextmanager
async def asking(request: Request, *, counted: bool = False) -> AsyncIterator[Asking]:
    """For one endpoint's work. `counted` is what counts among the requests of its tenant's limits.

    Raises InvalidKey and RateLimited.
    """
    tenant = tenant_of(request)
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
