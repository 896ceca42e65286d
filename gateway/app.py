"""The FastAPI application: routes, error envelope, request ids, lifespan."""

from __future__ import annotations

import gc
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager

from fastapi import FastAPI, Request
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api import adapters, generations, models, openapi, ops, tokens
from gateway.api.error_handlers import HANDLERS
from gateway.api.request_log import Handler, RequestLog
from gateway.config.settings import Settings
from gateway.http.workers import Worker
from gateway.service import running_service

log = logging.getLogger(__name__)

# Until the garbage collector looks at them; those of a hundred requests or so.
_NEW_OBJECTS = 10_000
_RATES = ("limit", "remaining", "reset")

EXPOSED_HEADERS = [
    "x-request-id",
    "x-adapter-version",
    "x-should-retry",
    "retry-after",
    "retry-after-ms",
    *(f"x-ratelimit-{what}-{of}" for what in _RATES for of in ("requests", "tokens")),
]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", generations.chat_completions),
    ("POST", "/v1/completions", generations.completions),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("GET", "/v1/models", models.list_models),
    ("GET", "/v1/models/{model:path}", models.retrieve_model),
    ("POST", "/v1/adapters", adapters.add),
    ("GET", "/v1/adapters", adapters.list_all),
    ("POST", "/v1/adapters/{name:path}/rollback", adapters.rollback),
    ("POST", "/v1/adapters/{name:path}/verify", adapters.verify),
    ("GET", "/v1/adapters/{name:path}", adapters.show),
    ("DELETE", "/v1/adapters/{name:path}", adapters.remove),
    ("POST", "/v1/load_lora_adapter", adapters.load),
    ("POST", "/v1/unload_lora_adapter", adapters.unload),
    ("GET", "/health/live", ops.live),
    ("GET", "/health/ready", ops.ready),
    ("GET", "/metrics", ops.metrics),
    ("GET", "/openapi.json", openapi.document),
)

_GENERATIONS = (generations.chat_completions, generations.completions)


class Gateway(FastAPI):
    """FastAPI, which requests for generations go past.

    Its layers find a route, keep stacks for files and dependencies that there are none of, and wrap
    `send` several times: a tenth of what such a request costs without its tokens.
    """

    generations: Mapping[str, ASGIApp]
    """By path."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            app = self.generations.get(scope["path"])
            if app is not None:
                scope["app"] = self
                await app(scope, receive, send)
                return
        await super().__call__(scope, receive, send)


def create_app(settings: Settings, worker: Worker | None = None) -> Gateway:
    """The application; it connects to Triton when it starts, not before."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running_service(settings) as app.state.service:
            with _seldom_collected():
                yield

    app = Gateway(
        title="triton-openai-gateway",
        lifespan=lifespan,
        openapi_url=None,
        exception_handlers={kind: handler for kind, handler in HANDLERS.items()},  # noqa: C416
        redirect_slashes=False,
        # Ours is `gateway.observability.tracing`; this one asks the environment at each request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    # Set by the server once it listens there.
    app.state.admin_port = None
    app.state.worker = worker
    app.state.openapi = openapi.build(ROUTES)
    for method, path, handler in ROUTES:
        app.add_route(path, handler, methods=[method])
    outside = [Middleware(RequestLog, paths={handler: path for _, path, handler in ROUTES})]
    if settings.cors_origins:
        outside.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                # The SDKs send X-Stainless-* headers; any that a preflight names is fine.
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
            )
        )
    app.user_middleware = outside
    app.generations = {p: _direct(h, outside) for _, p, h in ROUTES if h in _GENERATIONS}
    return app


@contextmanager
def _seldom_collected() -> Iterator[None]:
    """What there is now stays, and an answered request leaves no cycles behind.

    To look through all of it again and again took a tenth of the CPU, and 90 ms at a time.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _direct(handler: Handler, outside: Sequence[Middleware]) -> ASGIApp:
    """A handler as an application of its own, with the layers `outside` around it."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope["endpoint"] = handler
        try:
            # Nothing keeps the request while its answer is sent.
            response = await handler(Request(scope, receive))
            await response(scope, receive, send)
        except tuple(HANDLERS) as error:
            handle = next(handle for kind, handle in HANDLERS.items() if isinstance(error, kind))
            await (await handle(Request(scope), error))(scope, receive, send)

    app: ASGIApp = answer
    for layer, args, kwargs in reversed(outside):
        app = layer(app, *args, **kwargs)
    return app
