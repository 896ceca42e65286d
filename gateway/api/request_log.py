"""Pure ASGI middleware: a request id on every answer, one log line and one count per request."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import EngineError
from gateway.service import Service
from gateway.telemetry import request_id

log = logging.getLogger("gateway.requests")

Handler = Callable[[Request], Awaitable[Response]]

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestLog:
    """A client's own ``x-request-id`` is honoured when it is short and plain.

    An exception that nobody handles is answered here and not by Starlette, whose handler of last
    resort is outside of all middleware: its answer would have no request id and no count.
    """

    def __init__(self, app: ASGIApp, paths: Mapping[object, str]) -> None:
        self._app = app
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        own_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        request_id.set(own_id)
        started = time.perf_counter()
        status = 499

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = own_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            if status != 499:
                raise  # half an answer cannot become an error
            log.exception("unexpected error")
            error = EngineError("The server had an unexpected error.")
            answer = Response(error.json(), error.status, error.headers(), "application/json")
            await answer(scope, receive, send_with_id)
        finally:
            took_ms = (time.perf_counter() - started) * 1000
            # Unmatched paths share one label: a scanner must not fill the metrics.
            path = self._paths.get(scope.get("endpoint"), "unmatched")
            service: Service = scope["app"].state.service
            service.metrics.requests.labels(path, str(status)).inc()
            log.info("%s %s %s %.1f ms", scope["method"], path, status, took_ms)
