"""Authentication of tenants and of admins.

Tenants and admins send an API key in the header `authorization` or `x-api-key`. If a separate port
for admins is set, requests of admins must also come to that port.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import Depends, Request
from starlette.types import Scope

from gateway.api.request_log import context_of, exchange_of, service_of
from gateway.api.websites import check_website, passes_website_check
from gateway.config.tenants import Tenant
from gateway.http.http_errors import UnknownUrl
from gateway.observability.audit import Audit
from gateway.service import Service


def authenticate_tenant(request: Request) -> Tenant | None:
    """Return the tenant whose key was sent; None if the gateway needs no keys.

    Raise InvalidKey for a missing or wrong key, and DatabaseUnavailable if a key cannot be checked
    now. If the gateway needs no keys, raise ForWebsites for a request from another website's page.
    """
    scope = request.scope
    tenant = service_of(scope).access.tenant(credentials_of(scope))
    if tenant is None:
        check_website(scope)
    else:
        context_of(scope).tenant = tenant.name
    return tenant


def credentials_of(scope: Scope) -> Sequence[str]:
    """Return the request's API keys, each in the form of an `Authorization` value: `Bearer KEY`.

    Anthropic's clients send the key in the header `x-api-key`. A client may send both headers, with
    the key of another server in one of them. So the caller must try each returned key.
    """
    return credentials_in(exchange_of(scope).fields)


def credentials_in(fields: Mapping[bytes, bytes]) -> Sequence[str]:
    """Return the API keys in the headers `fields`, in the same form as `credentials_of`."""
    authorization = fields.get(b"authorization")
    found = [] if authorization is None else [authorization.decode("latin-1")]
    if (key := fields.get(b"x-api-key")) is not None:
        found.append(f"Bearer {key.decode('latin-1')}")
    return found


async def _get_tenant(request: Request) -> Tenant | None:
    return authenticate_tenant(request)


async def _get_service(request: Request) -> Service:
    return service_of(request.scope)


async def _make_audit(request: Request) -> Audit:
    """Return the audit log for actions of the calling admin.

    Raise UnknownUrl on a port that is not for admins. Raise the errors of `Access.admin` for a
    missing or wrong key.
    """
    _check_port(request)
    return Audit(_check_admin_key(request), service_of(request.scope).database)


async def _get_service_for_admin(
    request: Request, _: Annotated[Audit, Depends(_make_audit)]
) -> Service:
    return service_of(request.scope)


def authenticate_metrics_reader(request: Request) -> Service:
    """Return the service if the caller may read metrics, which contain tenant names.

    If there is a separate admin port, any caller on that port may read metrics. Otherwise an
    admin's key is needed, unless the gateway needs no keys at all.

    Raises:
        UnknownUrl: The request did not come to the admin port.
        ForWebsites: The gateway needs no keys, and another website's page sent the request.
        GatewayError: The key is missing or wrong; see `Access.admin`.
    """
    _check_port(request)
    service = service_of(request.scope)
    if _metrics_need_a_key(request):
        _check_admin_key(request)
    elif service.access.is_open:
        check_website(request.scope)
    return service


def may_read_details(request: Request) -> bool:
    """Return True if `authenticate_metrics_reader` would admit the caller.

    Endpoints use this function to decide if the caller gets all details. Health probes may send a
    tenant's key instead of an admin's key. So unlike `Access.admin`, this function does not count a
    wrong admin key as a failed attempt.
    """
    if not is_for_admins(request):
        return False
    service = service_of(request.scope)
    if _metrics_need_a_key(request):
        return service.access.is_admin(credentials_of(request.scope))
    return not service.access.is_open or passes_website_check(request.scope)


Running = Annotated[Service, Depends(_get_service)]
"""FastAPI dependency that gives an endpoint the `Service`. Any caller is admitted."""

Caller = Annotated[Tenant | None, Depends(_get_tenant)]
"""FastAPI dependency that gives an endpoint the result of `authenticate_tenant`."""

Admin = Annotated[Service, Depends(_get_service_for_admin)]
"""FastAPI dependency that gives an endpoint the `Service`.

Only admins are admitted: see `_make_audit`.
"""

Auditor = Annotated[Audit, Depends(_make_audit)]
"""FastAPI dependency that gives an endpoint the `Audit` log of the calling admin.

If an endpoint depends on both `Admin` and `Auditor`, FastAPI checks the key once.
"""


def _check_admin_key(request: Request) -> str:
    client = request.client
    return service_of(request.scope).access.admin(
        credentials_of(request.scope), None if client is None else client.host
    )


def _metrics_need_a_key(request: Request) -> bool:
    return request.app.state.admin_port is None and not service_of(request.scope).access.is_open


def is_for_admins(request: Request) -> bool:
    """Return True if the request came to the port for admins, or if no such port is set."""
    port = request.app.state.admin_port
    return port is None or request.scope["server"][1] == port


def _check_port(request: Request) -> None:
    if not is_for_admins(request):
        # Raise the same error as for an unknown URL, to hide that the path exists.
        raise UnknownUrl(request.method, request.url.path)
