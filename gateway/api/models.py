"""GET /v1/models and /v1/models/{id}, with vLLM's `root`, `parent` and `max_model_len`."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from adapters.record import Version, selected_name, selector
from gateway.api.auth import tenant_of
from gateway.service import Service


async def list_models(request: Request) -> Response:
    service: Service = request.app.state.service
    tenant = tenant_of(request)
    base = service.settings.model_name
    data = [_base(service)] if service.access.sees(tenant, base) else []
    data += [
        _adapter(service, record.name, record.version)
        for record in service.adapters.records
        if service.access.sees(tenant, record.name)
    ]
    return JSONResponse({"object": "list", "data": data})


async def retrieve_model(request: Request) -> Response:
    service: Service = request.app.state.service
    model = request.path_params["model"]
    service.access.route(service.router, tenant_of(request), model)
    if model == service.settings.model_name:
        return JSONResponse(_base(service))
    _, version = service.adapters.resolve(model)
    return JSONResponse(_adapter(service, model, version))


def _base(service: Service) -> dict[str, Any]:
    name = service.settings.model_name
    return _model(service, name, service.created, root=name, parent=None)


def _adapter(service: Service, model: str, version: Version) -> dict[str, Any]:
    """`root` is the exact version, which is a model name as well."""
    root = selector(selected_name(model), version.digest)
    return _model(service, model, int(version.created), root=root, parent=version.base)


def _model(
    service: Service, name: str, created: int, *, root: str, parent: str | None
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "gateway",
        "root": root,
        "parent": parent,
        # Unknown while Triton is away; the list itself stays up so that clients show the model.
        "max_model_len": service.replicas.capabilities.max_seq_len
        if service.replicas.ready
        else None,
    }
