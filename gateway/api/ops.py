"""GET /health/live, /health/ready and /metrics."""

from __future__ import annotations

from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, Response

from gateway.api.auth import metrics_reader
from gateway.api.worker_metrics import of_all_workers
from gateway.http.workers import Worker
from gateway.service import Service


async def live(request: Request) -> Response:
    """The process answers."""
    return JSONResponse({"status": "ok"})


async def ready(request: Request) -> Response:
    """200 when requests should come here, else 503 with the reason.

    A replica's open breaker does not count: only a request can close it again, and every gateway
    would be out of rotation at once.
    """
    service: Service = request.app.state.service
    if service.replicas.draining:
        return JSONResponse({"status": "draining"}, status_code=503)
    if not service.replicas.ready:
        return JSONResponse(
            {"status": "not ready", "triton": service.replicas.why_not_ready}, status_code=503
        )
    if not service.started.is_set():
        return JSONResponse({"status": "not ready", "adapters": "registering"}, status_code=503)
    selection = service.replicas.selection
    detail: dict[str, object] = {"status": "ready"}
    detail["engine"] = {
        "mode": selection.capabilities.mode,
        "model": selection.capabilities.model,
        "why": selection.why,
    }
    states = {replica.endpoint: replica.state for replica in service.replicas}
    if set(states.values()) != {"ready"} or service.replicas.several:
        detail["replicas"] = states
    if service.settings.redis_url is not None:
        # Known adapters are served from disk without it, so this gateway stays in rotation.
        detail["redis"] = "up" if service.adapters.store.stats.redis_up else "down"
    if service.adapters.refused:
        detail["adapters_refused"] = sorted(service.adapters.refused)
    return JSONResponse(detail)


async def metrics(request: Request) -> Response:
    """Those of this process, or of all workers of this gateway, each with its number."""
    worker: Worker | None = request.app.state.worker
    # Only another worker comes in by the socket in their folder, which has no port.
    internal = worker is not None and request.scope["server"][1] is None
    service: Service = request.app.state.service if internal else metrics_reader(request)
    service.metrics.engine_ready.set(service.replicas.ready)
    text = generate_latest(service.metrics.registry).decode()
    if worker is not None and not internal:
        text = await of_all_workers(worker, text)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
