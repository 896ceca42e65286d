"""The application: all endpoints in FastAPI, and those that generate also in front of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from functools import cache

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api import (
    adapters,
    embeddings,
    generations,
    keys,
    models,
    openapi,
    ops,
    queries,
    rerank,
    tokens,
    vllm_adapters,
    web,
)
from gateway.api.anthropic import endpoints as anthropic
from gateway.api.busy import BusyDoor
from gateway.api.console import actions as console_actions
from gateway.api.console import following as console_following
from gateway.api.console import internal as console_internal
from gateway.api.console import requests as console_requests
from gateway.api.console.looks import Console
from gateway.api.error_handlers import HANDLERS
from gateway.api.preflights import PreflightHints
from gateway.api.request_log import Handler, RequestLog
from gateway.api.responses import conversations, retrieval
from gateway.api.responses import endpoints as responses
from gateway.api.responses.background import BackgroundResponses
from gateway.api.responses.keeping import PendingItems
from gateway.api.responses.looks import TenantReadLimiter
from gateway.api.responses.unfinished import UnfinishedResponses
from gateway.conditions import poll_conditions
from gateway.config.settings import Settings
from gateway.http.connections import Connections
from gateway.http.errors import TooManyConnections
from gateway.http.exchange import NO_ROOM
from gateway.http.workers import Worker
from gateway.scheduling.start_queue import StartQueue
from gateway.service_setup import load_prompts, running_service

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
    *(adapters, vllm_adapters, keys),
    *(console_requests, console_following, console_actions, console_internal),
    *(ops, openapi, web),
)

ROUTES: Sequence[APIRoute] = [
    route for module in _MODULES for route in module.router.routes if isinstance(route, APIRoute)
]

_BUSY_MODULES = (generations, anthropic, responses, embeddings, rerank, tokens)
"""The ways in which work on prompts takes its turn."""


@cache
def _document() -> bytes:
    """The OpenAPI document. To make it takes a tenth of a start, and few ask for it."""
    return openapi.build(ROUTES)


def create_api(settings: Settings, worker: Worker | None = None) -> FastAPI:
    """Every endpoint, with what runs while the server does; connects to Triton when it starts.

    Raises ConfigurationError where there is no tokenizer.
    """
    prompts = load_prompts(settings)

    @asynccontextmanager
    async def lifespan(api: FastAPI) -> AsyncIterator[None]:
        workers = None if worker is None else worker.folder
        async with (
            running_service(settings, prompts, workers, api.state.starts) as api.state.service,
            poll_conditions(api.state.service, lambda: api.state.connections.problem),
            BackgroundResponses(api.state.service) as api.state.background,
        ):
            api.state.unfinished = UnfinishedResponses(api.state.service, api.state.background.runs)
            api.state.console = Console(api.state.service, worker)
            yield

    api = FastAPI(
        lifespan=lifespan,
        openapi_url=None,  # `openapi` serves it
        exception_handlers={kind: handler for kind, handler in HANDLERS.items()},  # noqa: C416
        redirect_slashes=False,
        # Ours is `gateway.observability.tracing`; this one asks the environment at each request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    api.state.read_limiter = TenantReadLimiter()
    api.state.pending_items = PendingItems()
    api.state.admin_port = None  # the server says which, once it listens there
    api.state.connections = Connections(settings.max_connections)  # the server says which
    api.state.starts = StartQueue()  # likewise
    api.state.worker = worker
    api.state.openapi = _document
    api.routes.extend(ROUTES)
    return api


def make_door(api: FastAPI, settings: Settings) -> BusyDoor:
    """Return the part that decides which requests wait while the event loop is busy."""
    paths = [
        route.path
        for module in _BUSY_MODULES
        for route in module.router.routes
        if isinstance(route, APIRoute) and "POST" in (route.methods or ())
    ]
    exposed = ", ".join(EXPOSED_HEADERS)
    return BusyDoor(paths, settings.cors_origins, exposed, lambda: api.state.service)


def compose(api: FastAPI, settings: Settings) -> ASGIApp:
    """What the server calls: generations go to their endpoints, everything else to FastAPI.

    FastAPI finds a route, keeps stacks for files and dependencies that a generation has none of,
    and wraps `send` several times. It knows these endpoints too: for its document, and to answer
    methods other than POST.
    """
    # Other servers' names for an endpoint come behind its own.
    labels: dict[object, str] = {route.endpoint: route.path for route in reversed(ROUTES)}
    labels[_no_room] = "no room"
    always = {route.path for route in ops.router.routes if isinstance(route, APIRoute)}

    def around(app: ASGIApp, *, generates: bool = False) -> ASGIApp:
        """The layers that every request passes."""
        if settings.cors_origins:
            app = CORSMiddleware(
                app,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                # The SDKs send X-Stainless-* headers; any that a preflight names is fine.
                allow_headers=["*"],
                # An origin that may call may do so from a public page to a private address.
                allow_private_network=True,
                expose_headers=EXPOSED_HEADERS,
            )
        return RequestLog(app, labels, generates=generates)

    # Inside FastAPI's last resort for exceptions, whose answer would have no envelope.
    api.add_middleware(around)
    handlers = generations.HOT | anthropic.HOT | responses.HOT
    hot = {path: around(_endpoint(handler), generates=True) for path, handler in handlers.items()}
    no_room = around(_endpoint(_no_room))
    too_many_parameters = around(_endpoint(queries.refuse_many))
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
        if NO_ROOM in scope.get("extensions", ()):
            # Other workers, which ask for admins, come in without a port.
            for_admins = scope["server"][1] in (None, api.state.admin_port)
            if scope["path"] not in always and not for_admins:
                chosen = no_room
        return chosen(scope, receive, send)

    return app


async def _no_room(_: Request) -> Response:
    raise TooManyConnections


def _endpoint(handler: Handler) -> ASGIApp:
    """A handler as an application, whose failures are answered as FastAPI answers them."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["endpoint"] = handler
        try:
            # Nothing keeps the request while its answer is sent.
            response = await handler(Request(scope, receive))
            await response(scope, receive, send)
        except tuple(HANDLERS) as error:
            handle = next(handle for kind, handle in HANDLERS.items() if isinstance(error, kind))
            await (await handle(Request(scope), error))(scope, receive, send)

    return app
