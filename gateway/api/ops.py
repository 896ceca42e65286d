"""GET /health/live, /health/ready and /metrics."""

from __future__ import annotations

from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from gateway.service import Service


async def live(request: Request) -> Response:
    """The process answers."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 when a request would be served now, else 503 with the reason."""
    service: Service = request.app.state.service
    if service.engine.draining:
        return JSONResponse({"status": "draining"}, status_code=503)
    if not service.engine.ready:
        return JSONResponse(
            {"status": "not ready", "triton": service.engine.why_not_ready}, status_code=503
        )
    if not service.started.is_set():
        return JSONResponse({"status": "not ready", "adapters": "registering"}, status_code=503)
    detail: dict[str, object] = {"status": "ready"}
    if service.settings.redis_url is not None:
        # Known adapters are served from disk without it, so this gateway stays in rotation.
        detail["redis"] = "up" if service.adapters.store.stats.redis_up else "down"
    if service.adapters.refused:
        detail["adapters_refused"] = sorted(service.adapters.refused)
    return JSONResponse(detail)


async def metrics(request: Request) -> Response:
    service: Service = request.app.state.service
    service.metrics.engine_ready.set(service.engine.ready)
    return Response(
        generate_latest(service.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST}
    )
