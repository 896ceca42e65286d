"""Who asks, by the `authorization` header and the port that the request came in on."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from gateway.api.request_log import context_of
from gateway.config.tenants import Tenant
from gateway.http.errors import UnknownUrl
from gateway.service import Service


def tenant_of(request: Request) -> Tenant | None:
    """The tenant whose key was sent; None where no key is needed. Raises InvalidKey."""
    service: Service = request.app.state.service
    tenant = service.access.tenant(request.headers.get("authorization"))
    if tenant is not None:
        context_of(request.scope).tenant = tenant.name
    return tenant


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _tenant(request: Request) -> Tenant | None:
    return tenant_of(request)


async def _service(request: Request) -> Service:
    return service_of(request)


async def _admin(request: Request) -> Service:
    """The service, for a caller with an admin key and on the port for admins.

    Raises UnknownUrl on another port, InvalidKey, and SwitchedOff where there is no admin key.
    """
    service: Service = request.app.state.service
    _check_port(request)
    service.access.check_admin(request.headers.get("authorization"))
    return service


def metrics_reader(request: Request) -> Service:
    """The service, for whoever may read its metrics, which name tenants.

    On a port of its own, and where no key is needed for anything, that is everybody.
    """
    service: Service = request.app.state.service
    _check_port(request)
    if request.app.state.admin_port is None and not service.access.open:
        service.access.check_admin(request.headers.get("authorization"))
    return service


Running = Annotated[Service, Depends(_service)]
"""The service, for everybody."""

Caller = Annotated[Tenant | None, Depends(_tenant)]
"""As `tenant_of`."""

Admin = Annotated[Service, Depends(_admin)]
"""The service, for admins: see `_admin`."""


def _check_port(request: Request) -> None:
    port = request.app.state.admin_port
    if port is not None and request.scope["server"][1] != port:
        # As for any URL that is unknown.
        raise UnknownUrl(request.method, request.url.path)
