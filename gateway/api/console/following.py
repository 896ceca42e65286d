"""GET /v1/admin/state and GET /v1/admin/events, from which the operators' console gets its data.

The first endpoint returns the current replicas, adapters, tenants and requests of this gateway. The
second endpoint streams the same data and its changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing, suppress

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.api.auth import Admin, Auditor, credentials_of
from gateway.api.console.answer_schemas import State
from gateway.api.console.console import Console
from gateway.api.request_log import exchange_of
from gateway.api.routing import ADMIN, ApiRouter, needs, refusals
from gateway.api.sse import EVENT_HEADERS, cancel_on_disconnect
from gateway.errors import ClientDisconnected, ShuttingDown
from gateway.service import Service

router = ApiRouter()


@router.get(
    "/v1/admin/state",
    summary="Get the current replicas, adapters, tenants and running requests of this gateway.",
    response_model=State,
    responses=refusals(*ADMIN),
    openapi_extra=needs("admin_key"),
)
async def state(request: Request, _: Admin) -> Response:
    console: Console = request.app.state.console
    shown = await console.feed.latest()
    return Response(shown.text, media_type="application/json")


@router.get(
    "/v1/admin/events",
    summary="Follow the state as server-sent events: complete at first, then changes.",
    response_class=Response,
    responses=refusals(*ADMIN, 503)
    | {
        200: {
            "description": "An event `state` with the complete state, then at most once a second "
            "an event `change` with a JSON Merge Patch (RFC 7396).",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        }
    },
    openapi_extra=needs("admin_key"),
)
async def events(request: Request, service: Admin, _: Auditor) -> Response:
    console: Console = request.app.state.console
    console.enter()
    return _EventFeed(service, console, credentials_of(request.scope))


class _EventFeed(Response):
    """A response that streams the console's data and its changes as server-sent events.

    The stream ends when the client disconnects, when the client's key is no longer an admin's key,
    or when the gateway shuts down.
    """

    def __init__(self, service: Service, console: Console, credentials: Sequence[str]) -> None:
        self._service = service
        self._console = console
        self._credentials = credentials
        self.status_code = 200
        self.background = None
        self.raw_headers = [*EVENT_HEADERS]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            with suppress(ClientDisconnected, ShuttingDown):
                async with cancel_on_disconnect(scope):
                    await send(head)
                    async with aclosing(self._console.feed.follow()) as events:
                        async for event in events:
                            if not self._may_go_on():
                                break
                            exchange.write(event)
                            await exchange.drain()
            exchange.end(b"")
        finally:
            self._console.leave()

    def _may_go_on(self) -> bool:
        service = self._service
        return service.access.is_admin(self._credentials) and not service.replicas.draining
