"""GET /health/live, /health/ready, /version and /metrics, also under other servers' paths.

See decision 083 in docs/decisions.
"""

from __future__ import annotations

from importlib.metadata import version

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse

from gateway.api.answer_schemas import Described, TroubleState
from gateway.api.auth import authenticate_metrics_reader, may_read_details
from gateway.api.operations.worker_metrics import merge_all_workers
from gateway.api.request_log import service_of
from gateway.api.routing import ADMIN, ApiRouter, needs, refusals
from gateway.api.siblings import is_internal
from gateway.http.workers import Worker
from gateway.service import Service

router = ApiRouter()


class Health(Described):
    status: str


class Release(Described):
    version: str


_RELEASE = Release(version=version("triton-openai-gateway"))


class DrivenModel(Described):
    """The Triton model that the gateway uses at its first available replica.

    `why` is the reason why the gateway selected this model. `warning` describes current problems
    with the models or the settings.
    """

    mode: str
    model: str
    why: str
    warning: str | None = None


class PoolMember(Described):
    """A replica with its weight, availability and load.

    `state` is, for example, `ready` or `draining`. `mode` and `model` describe the replica's Triton
    model; null if it is unknown. `in_flight` is the number of requests that the replica processes.
    """

    mode: str | None
    model: str | None
    weight: float
    state: str
    in_flight: int


class Readiness(Health):
    """The response of /health/ready, which says if requests can be sent to this gateway.

    `triton` and `adapters` are the reasons why the gateway is not ready. `replicas` maps the
    endpoint of each replica to its availability, for example `ready`. `pool` adds the model and the
    load of each replica. `disks` has messages about adapter versions that are missing on the disks
    of replicas. `troubles` are the current problems, the worst first.

    Fields other than `status` contain addresses and names of adapters. So only callers that may
    read the metrics get these fields.
    """

    triton: str | None = None
    adapters: str | None = None
    engine: DrivenModel | None = None
    replicas: dict[str, str] | None = None
    pool: dict[str, PoolMember] | None = None
    redis: str | None = None
    disks: list[str] | None = None
    adapters_refused: list[str] | None = None
    troubles: list[TroubleState] | None = None


@router.get("/health/live", summary="Check that the process is alive.", responses=refusals())
async def live() -> Health:
    """Return 200: the process can answer requests."""
    return Health(status="ok")


# The other paths are those of vLLM, SageMaker, Triton, NIM and Kubernetes. Clients of these servers
# check the health before their first request.
@router.get("/healthz", include_in_schema=False, response_model_exclude_none=True)
@router.get("/v1/health/ready", include_in_schema=False, response_model_exclude_none=True)
@router.get("/v2/health/ready", include_in_schema=False, response_model_exclude_none=True)
@router.get("/health", include_in_schema=False, response_model_exclude_none=True)
@router.get("/ping", include_in_schema=False, response_model_exclude_none=True)
@router.get(
    "/health/ready",
    summary="Check that requests can be served; admins also get the reasons why not.",
    response_model_exclude_none=True,
    responses=refusals() | {503: {"model": Readiness, "description": "Not ready."}},
    openapi_extra=needs("admin_key", optional=True),
)
async def ready(request: Request, response: Response) -> Readiness:
    """Return 200 if requests should be sent to this gateway, else 503.

    The gateway stays ready while the circuit breaker of a replica is open. Only a successful
    request closes the breaker, and an unready gateway would get no requests. Besides, the same
    failure would make all gateways unready at once.
    """
    readiness = _build_readiness(service_of(request.scope))
    response.status_code = 200 if readiness.status == "ready" else 503
    if not may_read_details(request):
        return Readiness(status=readiness.status)
    held = service_of(request.scope).troubles.facts().values()
    readiness.troubles = [TroubleState.model_validate(facts) for facts in held] or None
    return readiness


def _build_pool(service: Service) -> dict[str, PoolMember]:
    members = {}
    for replica in service.replicas:
        selection = replica.engine.last_selection
        members[replica.endpoint] = PoolMember(
            mode=None if selection is None else selection.capabilities.mode,
            model=None if selection is None else selection.capabilities.model,
            weight=replica.weight,
            state=replica.state,
            in_flight=replica.in_flight,
        )
    return members


def _build_readiness(service: Service) -> Readiness:
    if service.replicas.draining:
        return Readiness(status="draining")
    if not service.replicas.ready:
        return Readiness(status="not ready", triton=service.replicas.why_not_ready)
    if not service.started.is_set():
        return Readiness(status="not ready", adapters="registering")
    first = service.replicas.selections[0]
    driven = DrivenModel(
        mode=first.capabilities.mode,
        model=first.capabilities.model,
        why=first.why,
        warning=service.warning,
    )
    found = Readiness(status="ready", engine=driven)
    states = {replica.endpoint: replica.state for replica in service.replicas}
    if set(states.values()) != {"ready"} or service.replicas.has_several:
        found.replicas = states
        found.pool = _build_pool(service)
    if service.settings.redis_url is not None:
        # Report Redis without changing `status`: adapters on disk are served without Redis.
        found.redis = "up" if service.adapters.store.stats.redis_up else "down"
    found.disks = service.shortfalls or None
    if service.adapter_admin.refused:
        found.adapters_refused = sorted(service.adapter_admin.refused)
    return found


@router.get("/version", summary="This gateway's release.", responses=refusals())
async def release() -> Release:
    return _RELEASE


@router.get(
    "/metrics",
    summary="Metrics for Prometheus.",
    response_class=PlainTextResponse,
    responses=refusals(*ADMIN),
    openapi_extra=needs("admin_key", optional=True),
)
async def metrics(request: Request) -> Response:
    """Return the metrics of this gateway in Prometheus' text format.

    If the gateway has several workers, merge the metrics of all, with a label `worker`. Requests
    from other workers get the metrics of this worker only.
    """
    worker: Worker | None = request.app.state.worker
    internal = is_internal(request)
    service = service_of(request.scope) if internal else authenticate_metrics_reader(request)
    service.metrics.engine_ready.set(service.replicas.ready)
    text = generate_latest(service.metrics.registry).decode()
    if worker is not None and not internal:
        text = await merge_all_workers(worker, text)
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})
