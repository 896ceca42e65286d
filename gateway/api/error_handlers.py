"""Exceptions to answers, for the web framework and for what is put in front of it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match, Route

from adapters.errors import AdapterError, StoreError
from gateway.api.envelopes import answer_at
from gateway.api.failures import Failure, refusal
from gateway.api.meant_paths import find_meant_path
from gateway.api.request_log import context_of, exchange_of
from gateway.errors import ClientDisconnected, GatewayError, InternalError, InvalidRequest
from gateway.http.errors import MethodNotAllowed, UnknownUrl, WebSocketNotOffered


async def _failure(request: Request, error: Failure) -> Response:
    context = context_of(request.scope)
    context.error, context.refusal = type(error), refusal(error)
    fields = exchange_of(request.scope).fields
    status, headers, body = answer_at(request.url.path, fields, error)
    return Response(body, status, headers, "application/json")


async def _refused_by_framework(request: Request, error: HTTPException) -> Response:
    return await _failure(request, _from_framework(request, error))


def _from_framework(request: Request, error: HTTPException) -> GatewayError:
    method, path = request.method, request.url.path
    if error.status_code == 404:
        meant = find_meant_path(path)
        advice = f" Did you mean {meant.path}? {meant.advice}" if meant else ""
        return UnknownUrl(method, path, advice)
    if error.status_code == 405:
        methods = _methods(request)
        if "POST" in methods and _offers_websocket(request):
            return WebSocketNotOffered(path)
        return MethodNotAllowed(method, path, methods)
    # Otherwise it is a form that cannot be read.
    kind = InvalidRequest if error.status_code < 500 else InternalError
    return kind(str(error.detail))


def _methods(request: Request) -> list[str]:
    """All methods of this path; Starlette names only those of the first route that fits."""
    fitting = [
        route.methods or ()
        for route in request.app.routes
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE
    ]
    return sorted({method for methods in fitting for method in methods})


def _offers_websocket(request: Request) -> bool:
    """Return True if this is a handshake for WebSocket, which HTTP/1.0 has none of."""
    if request.method != "GET" or request.scope["http_version"] == "1.0":
        return False
    protocols = request.headers.get("upgrade", "").lower().split(",")
    return "websocket" in [protocol.strip() for protocol in protocols]


HANDLERS: dict[type[Exception], Callable[[Request, Any], Coroutine[Any, Any, Response]]] = {
    GatewayError: _failure,
    ClientDisconnected: _failure,
    AdapterError: _failure,
    StoreError: _failure,
    HTTPException: _refused_by_framework,
}
"""By base class."""
