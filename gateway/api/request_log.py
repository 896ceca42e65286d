"""Middleware that gives each request an id, and logs, counts and traces the request at its end.

A request is counted with its final status: a stream that fails after its headers were sent with
status 200 counts as an error.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.envelopes import build_error_response
from gateway.api.failures import status_of
from gateway.errors import (
    ClientDeadline,
    ClientDeadlineTooNear,
    ClientDisconnected,
    InternalError,
)
from gateway.http.exchange import EXCHANGE, Exchange
from gateway.observability.logs import log_request
from gateway.observability.request_context import RequestContext, current, parse_trace_parent
from gateway.service import Service

log = logging.getLogger("gateway.requests")

Handler = Callable[[Request], Awaitable[Response]]

_CONTEXT, _SERVICE = "gateway.request", "gateway.service"
# The status in logs and metrics if the client left before the response started.
_DISCONNECTED_STATUS = status_of(ClientDisconnected())
_BY_DEADLINE = (ClientDeadline, ClientDeadlineTooNear)
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# Paths that are not traced, because monitoring polls them every few seconds.
_UNTRACED = {
    *("/health", "/health/live", "/health/ready", "/healthz", "/metrics", "/ping"),
    *("/v1/health/ready", "/v2/health/ready"),
}


class RequestLog:
    """ASGI middleware that gives each request an id and logs, counts and traces it.

    A client's own ``x-request-id`` is used if it has at most 128 letters, digits and characters of
    `._:-`. Otherwise the gateway generates an id.

    This middleware also converts unhandled exceptions to error responses. Starlette would do so
    outside of all middleware: the error responses would have no request id and would not be
    counted.
    """

    def __init__(
        self, app: ASGIApp, paths: Mapping[object, str], *, generates: bool = False
    ) -> None:
        """Wrap `app`.

        Args:
            app: the application.
            paths: the path of each endpoint, for logs and metrics.
            generates: True if `app` serves generation requests.
        """
        self._app = app
        self._paths = paths
        self._generates = generates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = exchange_of(scope)
        context = _make_context(exchange.fields)
        if self._generates:
            context.path = scope["path"]
        scope[_CONTEXT] = context
        current.set(context)
        exchange.headers.append((b"x-request-id", context.request_id.encode("ascii")))
        service: Service = scope["app"].state.service
        scope[_SERVICE] = service
        # Do not trace or log a request that another worker process forwarded: that worker traces
        # and logs the client's request. A forwarded request has no server port.
        of_worker = scope["server"][1] is None
        if service.tracer is not None and scope["path"] not in _UNTRACED and not of_worker:
            context.span = service.tracer.begin(scope["method"], scope["scheme"], context.parent)
        try:
            await self._app(scope, receive, send)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as unexpected:  # includes panics of Rust extensions
            context.error = type(unexpected)
            if exchange.status:
                context.late_status = status_of(unexpected)
                raise  # an answer that has started cannot become an error
            log.exception("unexpected error")
            failed = InternalError("The server had an unexpected error.")
            code, headers, body = build_error_response(scope["path"], exchange.fields, failed)
            response = Response(body, code, headers, "application/json")
            await response(scope, receive, send)
        finally:
            # Paths without an endpoint share one label. Otherwise a scanner that tries many paths
            # would create many time series in Prometheus.
            path = self._paths.get(scope.get("endpoint"), "unmatched")
            status = exchange.status or _DISCONNECTED_STATUS
            ended = context.late_status or status
            # Count a missed deadline of the client like a disconnect: alerts use this count, and
            # must not fire because a client sets short deadlines.
            counted = _DISCONNECTED_STATUS if context.error in _BY_DEADLINE else ended
            service.metrics.requests.labels(path, str(counted)).inc()
            facts = context.facts(scope["method"], path, ended)
            if not of_worker:
                log_request(log, facts)
            if self._generates:
                service.monitor.record_answer(context, counted)
            if context.span is not None:
                context.span.end(facts, header_status=status)


def service_of(scope: Scope) -> Service:
    """Return the `Service` of this process, which `RequestLog` has added to the request's scope.

    Reading the service from the scope is ten times faster than reading Starlette's `app.state`.
    """
    service: Service = scope[_SERVICE]
    return service


def header_of(scope: Scope, name: bytes) -> str | None:
    """Return a request's header by its lower-case name; None if it is missing."""
    fields: Mapping[bytes, bytes] = scope["extensions"][EXCHANGE].fields
    value = fields.get(name)
    return None if value is None else value.decode("latin-1")


def exchange_of(scope: Scope) -> Exchange:
    """Return the HTTP exchange of a request: its headers, its connection and its response."""
    exchange: Exchange = scope["extensions"][EXCHANGE]
    return exchange


def context_of(scope: Scope) -> RequestContext:
    """Return the `RequestContext` of a request, which `RequestLog` has added to the scope."""
    context: RequestContext = scope[_CONTEXT]
    return context


def is_request_id(text: str) -> bool:
    """Return True if a text is a valid request id."""
    return _SANE_ID.fullmatch(text.encode()) is not None


def find_own_id(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the valid request id that the client sent in these headers; None if there is none."""
    given = headers.get(b"x-request-id")
    return given if given is not None and _SANE_ID.fullmatch(given) else None


def _make_context(headers: Mapping[bytes, bytes]) -> RequestContext:
    own_id = find_own_id(headers)
    request_id = secrets.token_hex(16) if own_id is None else own_id.decode("ascii")
    return RequestContext(request_id, parse_trace_parent(headers))
