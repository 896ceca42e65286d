"""Authentication, rate limiting, reading and parsing of a request in any protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import Request

from gateway.api.auth import authenticate_tenant
from gateway.api.intake import Intake
from gateway.api.openai.messages import Strict
from gateway.api.openai.parameters import Parsed
from gateway.api.request_log import service_of
from gateway.config.tenants import Tenant
from gateway.errors import InvalidRequest
from gateway.tenancy.limits.reservation import Reservation

W = TypeVar("W", bound=Strict)

Rename = Callable[[InvalidRequest], InvalidRequest]
"""Function that renames the parameter in an error about a chat request.

The function gets an error with the chat request's parameter name. It returns the error with the
parameter name in the client's protocol.
"""


@dataclass(slots=True)
class ReceivedRequest(Generic[W]):
    """A request whose body was read and parsed.

    Attributes:
        request: the HTTP request.
        tenant: the tenant that sent the request; None if the gateway needs no keys.
        intake: the reader of the body. It holds the request's shares of the memory budgets, and
            runs expensive work on the body in threads.
        reservation: holds the request's first slot of the tenant's limit `concurrent_requests`.
        wanted: the parsed body.
        hints: names of parameters without effect.
    """

    request: Request
    tenant: Tenant | None
    intake: Intake
    reservation: Reservation
    wanted: W
    hints: tuple[str, ...]

    @property
    def tenant_name(self) -> str:
        """The tenant's name, "" without tenants."""
        return self.tenant.name if self.tenant else ""


@asynccontextmanager
async def receive(
    request: Request, parse: Callable[[bytes], Parsed[W]], rename: Rename | None = None
) -> AsyncIterator[ReceivedRequest[W]]:
    """Authenticate the client, check the tenant's limits, parse the body, and yield the request.

    The memory budgets and the tenant's limits count the request until the context ends.
    `failures.TABLE` lists the errors that this context manager raises.

    If the code inside the context raises InvalidRequest, `rename` converts the error to one with
    the client's parameter name. Errors of `parse` already have the client's parameter name.
    """
    service = service_of(request.scope)
    tenant = authenticate_tenant(request)
    async with Intake(request, tenant) as intake:
        # Refuse a request above the tenant's limits before its body is read.
        with await service.accounting.count(tenant, slots=1) as reservation:
            await service.replicas.wait_until_back(tenant.name if tenant else "")
            wanted, hints, unknown = await intake.read(parse)
            if unknown:
                service.metrics.count_unknown_parameters(unknown, tenant.name if tenant else "")
            try:
                yield ReceivedRequest(request, tenant, intake, reservation, wanted, hints)
            except InvalidRequest as error:
                if rename is None:
                    raise
                raise rename(error) from None
