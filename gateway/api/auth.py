"""Who asks, by the headers `authorization` or `x-api-key` and the port that the request came to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import Depends, Request
from starlette.types import Scope

from gateway.api.request_log import context_of, exchange_of, service_of
from gateway.api.websites import check_website, may_come
from gateway.config.tenants import Tenant
from gateway.http.errors import UnknownUrl
from gateway.observability.audit import Audit
from gateway.service import Service


def tenant_of(request: Request) -> Tenant | None:
    """The tenant whose key was sent; None where no key is needed.

    Raises InvalidKey, and ForWebsites where no key is needed.
    """
    scope = request.scope
    tenant = service_of(scope).access.tenant(credentials_of(scope))
    if tenant is None:
        check_website(scope)
    else:
        context_of(scope).tenant = tenant.name
    return tenant


def credentials_of(scope: Scope) -> Sequence[str]:
    """Return what a request presents as its keys, as values of `Authorization`.

    Anthropic's clients have the header `x-api-key`. A program may send both, one of them for
    another server, so either may hold the key of this gateway.
    """
    return credentials_in(exchange_of(scope).fields)


def credentials_in(fields: Mapping[bytes, bytes]) -> Sequence[str]:
    """Return the credentials of a request with these headers, as `credentials_of`."""
    authorization = fields.get(b"authorization")
    found = [] if authorization is None else [authorization.decode("latin-1")]
    if (key := fields.get(b"x-api-key")) is not None:
        found.append(f"Bearer {key.decode('latin-1')}")
    return found


async def _tenant(request: Request) -> Tenant | None:
    return tenant_of(request)


async def _service(request: Request) -> Service:
    return service_of(request.scope)


async def _auditor(request: Request) -> Audit:
    """For a caller with an admin key and on the port for admins.

    Raises UnknownUrl on another port, and what `Access.admin` raises.
    """
    _check_port(request)
    return Audit(_admin_key(request))


async def _admin(request: Request, _: Annotated[Audit, Depends(_auditor)]) -> Service:
    return service_of(request.scope)


def metrics_reader(request: Request) -> Service:
    """The service, for whoever may read its metrics, which name tenants.

    On a port of its own, and where no key is needed for anything, that is everybody.
    """
    _check_port(request)
    service = service_of(request.scope)
    if _metrics_need_a_key(request):
        _admin_key(request)
    elif service.access.open:
        check_website(request.scope)
    return service


def may_read_details(request: Request) -> bool:
    """Whether the caller is one that `metrics_reader` lets in.

    For what everybody may ask, and is told less of: probes send what key they have, so one that is
    no admin's does not count as a wrong one.
    """
    if not is_for_admins(request):
        return False
    service = service_of(request.scope)
    if _metrics_need_a_key(request):
        return service.access.is_admin(credentials_of(request.scope))
    return not service.access.open or may_come(request.scope)


Running = Annotated[Service, Depends(_service)]
"""The service, for everybody."""

Caller = Annotated[Tenant | None, Depends(_tenant)]
"""As `tenant_of`."""

Admin = Annotated[Service, Depends(_admin)]
"""The service, for admins: see `_auditor`."""

Auditor = Annotated[Audit, Depends(_auditor)]
"""To be told of what the admin does. The key is looked at once, for both."""


def _admin_key(request: Request) -> str:
    client = request.client
    return service_of(request.scope).access.admin(
        credentials_of(request.scope), None if client is None else client.host
    )


def _metrics_need_a_key(request: Request) -> bool:
    return request.app.state.admin_port is None and not service_of(request.scope).access.open


def is_for_admins(request: Request) -> bool:
    """Whether it came in where admins do: on their port, where they have one."""
    port = request.app.state.admin_port
    return port is None or request.scope["server"][1] == port


def _check_port(request: Request) -> None:
    if not is_for_admins(request):
        # As for any URL that is unknown.
        raise UnknownUrl(request.method, request.url.path)
