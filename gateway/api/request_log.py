"""Around every request: its id on the answer, and one log line, count and span at its end.

A request counts as what it ended with: the headers of a stream say 200 before anybody knows.
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

from gateway.api.envelopes import answer_at
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
# Of a request that nobody waits for an answer to any more.
_LEFT = status_of(ClientDisconnected())
_BY_DEADLINE = (ClientDeadline, ClientDeadlineTooNear)
_SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
# Asked every few seconds by machines.
_UNTRACED = {
    *("/health", "/health/live", "/health/ready", "/healthz", "/metrics", "/ping"),
    *("/v1/health/ready", "/v2/health/ready"),
}


class RequestLog:
    """A client's own ``x-request-id`` is honoured when it is short and plain.

    An exception that nobody handles is answered here and not by Starlette, whose handler of last
    resort is outside of all middleware: its answer would have no request id and no count.
    """

    def __init__(
        self, app: ASGIApp, paths: Mapping[object, str], *, generates: bool = False
    ) -> None:
        """`generates` says that what comes here may generate."""
        self._app = app
        self._paths = paths
        self._generates = generates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = exchange_of(scope)
        context = _context(exchange.fields)
        if self._generates:
            context.path = scope["path"]
        scope[_CONTEXT] = context
        current.set(context)
        exchange.headers.append((b"x-request-id", context.request_id.encode("ascii")))
        service: Service = scope["app"].state.service
        scope[_SERVICE] = service
        # What other workers ask has no port. What made them ask has a line of its own.
        of_worker = scope["server"][1] is None
        if service.tracer is not None and scope["path"] not in _UNTRACED and not of_worker:
            context.span = service.tracer.begin(scope["method"], scope["scheme"], context.parent)
        try:
            await self._app(scope, receive, send)
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as unexpected:  # a panic in Rust is no Exception
            context.error = type(unexpected)
            if exchange.status:
                context.late_status = status_of(unexpected)
                raise  # half an answer cannot become an error
            log.exception("unexpected error")
            failed = InternalError("The server had an unexpected error.")
            told, headers, body = answer_at(scope["path"], exchange.fields, failed)
            response = Response(body, told, headers, "application/json")
            await response(scope, receive, send)
        finally:
            # Unmatched paths share one label: a scanner must not fill the metrics.
            path = self._paths.get(scope.get("endpoint"), "unmatched")
            status = exchange.status or _LEFT
            ended = context.late_status or status
            # Alerts read it: a key that sets short deadlines must not wake anybody.
            counted = _LEFT if context.error in _BY_DEADLINE else ended
            service.metrics.requests.labels(path, str(counted)).inc()
            facts = context.facts(scope["method"], path, ended)
            if not of_worker:
                log_request(log, facts)
            if self._generates:
                service.monitor.record_answer(context, counted)
            if context.span is not None:
                context.span.end(facts, header_status=status)


def service_of(scope: Scope) -> Service:
    """Within `RequestLog`: to ask Starlette's application for it takes ten times as long."""
    service: Service = scope[_SERVICE]
    return service


def header_of(scope: Scope, name: bytes) -> str | None:
    """What a request says under this name, in lower case."""
    fields: Mapping[bytes, bytes] = scope["extensions"][EXCHANGE].fields
    value = fields.get(name)
    return None if value is None else value.decode("latin-1")


def exchange_of(scope: Scope) -> Exchange:
    exchange: Exchange = scope["extensions"][EXCHANGE]
    return exchange


def context_of(scope: Scope) -> RequestContext:
    """What is known of the request, within `RequestLog`."""
    context: RequestContext = scope[_CONTEXT]
    return context


def may_be_an_id(text: str) -> bool:
    """Whether a request can have this id."""
    return _SANE_ID.fullmatch(text.encode()) is not None


def find_own_id(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the id that its client has given a request with these headers; None without one."""
    given = headers.get(b"x-request-id")
    return given if given is not None and _SANE_ID.fullmatch(given) else None


def _context(headers: Mapping[bytes, bytes]) -> RequestContext:
    own_id = find_own_id(headers)
    request_id = secrets.token_hex(16) if own_id is None else own_id.decode("ascii")
    return RequestContext(request_id, parse_trace_parent(headers))
