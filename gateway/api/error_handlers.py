"""Exception handlers that build error responses.

`gateway.app` passes these handlers to FastAPI. It also calls them for the endpoints that run
without FastAPI.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from adapters.errors import AdapterError, StoreError
from gateway.api.envelopes import build_error_response
from gateway.api.failures import Failure, get_refusal_reason
from gateway.api.meant_paths import find_meant_path
from gateway.api.request_log import context_of, exchange_of
from gateway.errors import ClientDisconnected, GatewayError, InternalError, InvalidRequest
from gateway.http.http_errors import MethodNotAllowed, UnknownUrl, WebSocketNotOffered


async def _handle_failure(request: Request, error: Failure) -> Response:
    context = context_of(request.scope)
    context.error, context.refusal = type(error), get_refusal_reason(error)
    fields = exchange_of(request.scope).fields
    status, headers, body = build_error_response(request.url.path, fields, error)
    return Response(body, status, headers, "application/json")


async def _handle_framework_error(request: Request, error: HTTPException) -> Response:
    return await _handle_failure(request, _convert_framework_error(request, error))


def _convert_framework_error(request: Request, error: HTTPException) -> GatewayError:
    method, path = request.method, request.url.path
    if error.status_code == 404:
        meant = find_meant_path(path)
        advice = f" Did you mean {meant.path}? {meant.advice}" if meant else ""
        return UnknownUrl(method, path, advice)
    if error.status_code == 405:
        methods = _list_methods(request)
        if "POST" in methods and _offers_websocket(request):
            return WebSocketNotOffered(path)
        return MethodNotAllowed(method, path, methods)
    # Statuses other than 404 and 405 come from Starlette's form parser, for a malformed form.
    kind = InvalidRequest if error.status_code < 500 else InternalError
    return kind(str(error.detail))


def _list_methods(request: Request) -> list[str]:
    """Return the HTTP methods of all routes that match the request's path, sorted.

    Starlette's error names the methods of only one of these routes.
    """
    fitting = [
        route.methods or ()
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    return sorted({method for methods in fitting for method in methods})


def _offers_websocket(request: Request) -> bool:
    """Return True if the request is a WebSocket handshake, which needs HTTP/1.1."""
    if request.method != "GET" or request.scope["http_version"] == "1.0":
        return False
    protocols = request.headers.get("upgrade", "").lower().split(",")
    return "websocket" in [protocol.strip() for protocol in protocols]


HANDLERS: dict[type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    GatewayError: _handle_failure,
    ClientDisconnected: _handle_failure,
    AdapterError: _handle_failure,
    StoreError: _handle_failure,
    HTTPException: _handle_framework_error,
}
"""The handler for each error class and its subclasses."""
