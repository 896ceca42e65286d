"""The ASGI application. Endpoints that generate text are called directly, not through FastAPI.

See decisions 035 and 086 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from functools import cache

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api import openapi, queries, tokens
from gateway.api.admin import adapters, audit, keys, vllm_adapters
from gateway.api.anthropic import endpoints as anthropic
from gateway.api.busy import BusyDoor
from gateway.api.console import actions as console_actions
from gateway.api.console import following as console_following
from gateway.api.console import internal as console_internal
from gateway.api.console import pages as web
from gateway.api.console import requests as console_requests
from gateway.api.console.console import Console
from gateway.api.error_handlers import HANDLERS
from gateway.api.openai import endpoints as generations
from gateway.api.openai import models
from gateway.api.operations import endpoints as ops
from gateway.api.preflights import PreflightHints
from gateway.api.request_log import Handler, RequestLog
from gateway.api.responses import conversations, retrieval
from gateway.api.responses import endpoints as responses
from gateway.api.responses.background import BackgroundResponses
from gateway.api.responses.keeping import PendingItems
from gateway.api.responses.looks import TenantReadLimiter
from gateway.api.responses.unfinished import UnfinishedResponses
from gateway.api.vectors import embeddings, rerank
from gateway.conditions import poll_conditions
from gateway.config.settings import Settings
from gateway.http.connections import Connections
from gateway.http.exchange import OVER_CONNECTION_LIMIT
from gateway.http.http_errors import TooManyConnections
from gateway.http.workers import Worker
from gateway.scheduling.start_queue import StartQueue
from gateway.service_setup import load_prompts, run_service

_RATES = ("limit", "remaining", "reset")

EXPOSED_HEADERS = [
    "x-request-id",
    "x-adapter-version",
    "x-ignored-parameters",
    "x-should-retry",
    "retry-after",
    "retry-after-ms",
    *(f"x-ratelimit-{what}-{of}" for what in _RATES for of in ("requests", "tokens")),
]

_MODULES = (
    *(generations, anthropic, responses, retrieval, conversations),
    *(embeddings, rerank, tokens, models),
    *(adapters, vllm_adapters, keys, audit),
    *(console_requests, console_following, console_actions, console_internal),
    *(ops, openapi, web),
)

ROUTES: Sequence[APIRoute] = [
    route for module in _MODULES for route in module.router.routes if isinstance(route, APIRoute)
]

_BUSY_MODULES = (generations, anthropic, responses, embeddings, rerank, tokens)
"""Modules whose POST endpoints process prompts.

While the event loop is busy, requests to these endpoints queue.
"""


@cache
def _build_document() -> bytes:
    """Return the OpenAPI document.

    The document is built when the first client requests it, because building it takes a tenth of
    the start-up time, and few clients need it.
    """
    return openapi.build(ROUTES)


def create_api(settings: Settings, worker: Worker | None = None) -> FastAPI:
    """Return the FastAPI application with all endpoints and the service's lifespan.

    The service connects to Triton when the application starts. Raise ConfigurationError if the
    tokenizer cannot be loaded.
    """
    prompts = load_prompts(settings)

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        workers = None if worker is None else worker.folder
        async with (
            run_service(settings, prompts, workers, api.state.starts) as api.state.service,
            poll_conditions(api.state.service, lambda: api.state.connections.problem),
            BackgroundResponses(api.state.service) as api.state.background,
        ):
            api.state.unfinished = UnfinishedResponses(api.state.service, api.state.background.runs)
            api.state.console = Console(api.state.service, worker)
            yield

    api = FastAPI(
        lifespan=lifespan,
        openapi_url=None,  # `gateway.api.openapi` serves the document
        exception_handlers={kind: handler for kind, handler in HANDLERS.items()},  # noqa: C416
        redirect_slashes=False,
        # Turn off FastAPI's own tracing, which reads the environment for each request.
        # `gateway.observability.tracing` is used instead.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    api.state.read_limiter = TenantReadLimiter()
    api.state.pending_items = PendingItems()
    # The server replaces the next three attributes when it starts.
    api.state.admin_port = None
    api.state.connections = Connections(settings.max_connections)
    api.state.starts = StartQueue()
    api.state.worker = worker
    api.state.openapi = _build_document
    api.routes.extend(ROUTES)
    return api


def make_door(api: FastAPI, settings: Settings) -> BusyDoor:
    """Return the object that decides which requests queue while the event loop is busy."""
    paths = [
        route.path
        for module in _BUSY_MODULES
        for route in module.router.routes
        if isinstance(route, APIRoute) and "POST" in (route.methods or ())
    ]
    exposed = ", ".join(EXPOSED_HEADERS)
    return BusyDoor(paths, settings.cors_origins, exposed, lambda: api.state.service)


def compose(api: FastAPI, settings: Settings) -> ASGIApp:
    """Return the ASGI application, which passes most requests to FastAPI.

    POST requests to generation endpoints skip FastAPI. This saves the time of FastAPI's routing,
    its exit stacks for files and dependencies, and its wrappers of `send`. The generation endpoints
    are registered in FastAPI, too, for methods other than POST and for the OpenAPI document.
    """
    # Label each endpoint with its first path. An endpoint may have further paths, because clients
    # of other inference servers use them.
    labels: dict[object, str] = {route.endpoint: route.path for route in reversed(ROUTES)}
    labels[_refuse_connection] = "no room"
    always = {route.path for route in ops.router.routes if isinstance(route, APIRoute)}

    def wrap(app: ASGIApp, *, generates: bool = False) -> ASGIApp:
        """Wrap an application in the middleware that applies to every request."""
        if settings.cors_origins:
            app = CORSMiddleware(
                app,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                # Allow all headers, because the SDKs send X-Stainless-* headers.
                allow_headers=["*"],
                # Allow a page on a public address to call this gateway on a private address.
                allow_private_network=True,
                expose_headers=EXPOSED_HEADERS,
            )
        return RequestLog(app, labels, generates=generates)

    # Add the middleware inside of FastAPI's handler for unexpected exceptions. The middleware then
    # handles these exceptions first, and responds in the API's error format.
    api.add_middleware(wrap)
    handlers = generations.HOT | anthropic.HOT | responses.HOT
    hot = {
        path: wrap(_make_endpoint_app(handler), generates=True)
        for path, handler in handlers.items()
    }
    refuse_connection = wrap(_make_endpoint_app(_refuse_connection))
    too_many_parameters = wrap(_make_endpoint_app(queries.refuse_many))
    preflights = PreflightHints(settings.cors_origins)

    def app(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        scope["app"] = api
        chosen: ASGIApp = api
        if scope["type"] == "http":
            if scope["method"] == "POST":
                chosen = hot.get(scope["path"], api)
            else:
                preflights.note(scope)
            if chosen is api and queries.has_too_many(scope):
                chosen = too_many_parameters
        if OVER_CONNECTION_LIMIT in scope.get("extensions", ()):
            # Admit requests of admins in spite of the limit. A request without a port comes from
            # another worker, which has forwarded it for an admin.
            for_admins = scope["server"][1] in (None, api.state.admin_port)
            if scope["path"] not in always and not for_admins:
                chosen = refuse_connection
        return chosen(scope, receive, send)

    return app


async def _refuse_connection(_: Request) -> Response:
    raise TooManyConnections


def _make_endpoint_app(handler: Handler) -> ASGIApp:
    """Return an ASGI application that calls a handler, with the same error handlers as FastAPI."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["endpoint"] = handler
        try:
            # Do not store the request in a variable: it would stay in memory until the response has
            # ended.
            response = await handler(Request(scope, receive))
            await response(scope, receive, send)
        except tuple(HANDLERS) as error:
            handle = next(handle for kind, handle in HANDLERS.items() if isinstance(error, kind))
            await (await handle(Request(scope), error))(scope, receive, send)

    return app
