"""Endpoints for admins to cancel requests, and to set weights of replicas or drain replicas."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Request
from pydantic import Field

from gateway.api.answer_schemas import AnswerModel
from gateway.api.auth import Admin, Auditor
from gateway.api.body import json_body
from gateway.api.console.answer_schemas import Override as OverrideState
from gateway.api.console.console import Console
from gateway.api.openai.messages import Strict
from gateway.api.routing import ADMIN, BODY, ApiRouter, Name, needs, refusals
from gateway.errors import InvalidRequest, NotFound
from gateway.observability.audit import Audit
from gateway.scheduling.override import MAX_WEIGHT, Override
from gateway.service import Service

router = ApiRouter()

_MAX_JSON_BYTES = 64 * 1024


class ReplicaChange(Strict):
    """Request body that overrides the configured weight of a replica, or drains the replica.

    A field that is missing or null leaves the current value unchanged.
    """

    weight: Annotated[float | None, Field(ge=0, le=MAX_WEIGHT, allow_inf_nan=False)] = None
    drain: bool | None = None


class ReplicaChanged(AnswerModel):
    endpoint: str
    object: Literal["replica"] = "replica"
    weight: float
    drain: bool
    override: Annotated[
        OverrideState | None,
        Field(description="The admins' override; null if the configuration applies."),
    ]


class RequestCancelled(AnswerModel):
    id: str
    object: Literal["request"] = "request"
    cancelled: Literal[True] = True


@router.post(
    "/v1/admin/requests/{request_id}/cancel",
    summary="Cancel a running request; its client gets an error.",
    responses=refusals(*ADMIN, 404, 503),
    openapi_extra=needs("admin_key"),
)
async def cancel(request: Request, _: Admin, audit: Auditor, request_id: Name) -> RequestCancelled:
    """Cancel a running request. `request_id` is a key of `requests` in /v1/admin/state."""
    console: Console = request.app.state.console
    async with audit.action("requests.cancel", request_id, None):
        if not (console.cancel(request_id) or await console.cancel_on_siblings(request_id)):
            raise NotFound(f"There is no running request `{request_id[:200]}`.")
    return RequestCancelled(id=request_id)


@router.post(
    "/v1/admin/replicas/{endpoint:path}",
    summary="Override the weight or drain of a replica, on all gateways.",
    responses=refusals(*BODY, *ADMIN, 404, 503),
    openapi_extra=needs("admin_key", json=ReplicaChange),
    response_model_exclude_unset=True,
)
async def change(
    service: Admin,
    audit: Auditor,
    endpoint: Name,
    wanted: Annotated[ReplicaChange, json_body(ReplicaChange, _MAX_JSON_BYTES)],
) -> ReplicaChanged:
    """Override the weight of a replica, or drain the replica.

    The override applies until it is deleted, also after a restart of the gateway.
    """
    _check_known(service, endpoint)
    before = service.overrides.current.get(endpoint, Override())
    override = Override(
        before.weight if wanted.weight is None else wanted.weight,
        before.drain if wanted.drain is None else wanted.drain,
    )
    if override == Override():
        raise InvalidRequest("weight: missing, and so is drain; send one of them.", param="weight")
    await _store_override(service, audit, "replicas.override", endpoint, override)
    return _build_replica(service, endpoint)


@router.delete(
    "/v1/admin/replicas/{endpoint:path}",
    summary="Delete the override of a replica, so that the configuration applies again.",
    responses=refusals(*ADMIN, 404, 503),
    openapi_extra=needs("admin_key"),
    response_model_exclude_unset=True,
)
async def take_back(service: Admin, audit: Auditor, endpoint: Name) -> ReplicaChanged:
    if endpoint not in service.overrides.current:
        _check_known(service, endpoint)
    await _store_override(service, audit, "replicas.take_back", endpoint, None)
    return _build_replica(service, endpoint)


async def _store_override(
    service: Service, audit: Audit, action: str, endpoint: str, override: Override | None
) -> None:
    known = service.overrides.current.get(endpoint)
    async with audit.action(action, endpoint, known and known.to_dict()) as entry:
        await service.overrides.put(endpoint, override)
        entry.after = override and override.to_dict()


def _check_known(service: Service, endpoint: str) -> None:
    """Raise NotFound if no replica has this endpoint."""
    if all(replica.endpoint != endpoint for replica in service.replicas):
        raise NotFound(f"There is no replica `{endpoint[:200]}` here.")


def _build_replica(service: Service, endpoint: str) -> ReplicaChanged:
    """Return the current weight, drain and override of a replica.

    For an endpoint without a replica, the weight is 0 and `drain` is false.
    """
    override = service.overrides.current.get(endpoint)
    weight, drain = 0.0, False
    for replica in service.replicas:
        if replica.endpoint == endpoint:
            weight, drain = replica.weight, replica.drained_at is not None
    return ReplicaChanged(
        endpoint=endpoint,
        object="replica",
        weight=weight,
        drain=drain,
        override=None if override is None else OverrideState.model_validate(override.to_dict()),
    )
