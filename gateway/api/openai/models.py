"""GET /v1/models and /v1/models/{id}, with vLLM's `root`, `parent` and `max_model_len`.

Requests with the header `anthropic-version` get Anthropic's format.
"""

from __future__ import annotations

from typing import Literal

from fastapi import Request, Response

from adapters.record import Version, selected_name, selector
from gateway.api.answer_schemas import AnswerModel, Count
from gateway.api.anthropic.models import PAGE, ModelInfo, ModelPage, describe, select_page
from gateway.api.auth import Caller, Running
from gateway.api.envelopes import is_anthropic
from gateway.api.request_log import exchange_of
from gateway.api.routing import ApiRouter, Name, needs, refusals
from gateway.catalog.mapped import AnyModel
from gateway.config.mapped import EmbeddingModel
from gateway.config.tenants import Tenant
from gateway.service import Service

router = ApiRouter()

# The response is in OpenAI's or Anthropic's format, depending on this header. Without `vary`, a
# shared cache would send responses in one format to clients that need the other format.
_VARIES = ("vary", "anthropic-version")


class Model(AnswerModel):
    """A model that requests can name.

    `root` of an adapter is `NAME@DIGEST`. Requests may use this name to get exactly this version of
    the adapter, also after a rollback. `root` of any other model is the model's name.

    `parent` is the base model of an adapter. `max_model_len` is the longest context of any replica,
    in tokens. OpenRouter's clients read the same value as `context_length`.

    `modes` are the interfaces of the replicas' Triton models (`token`, `text` or `llmapi`), which
    support different parameters. For an embedding or rerank model, `modes` is the task instead:
    `embeddings` or `rerank`.
    """

    id: str
    object: Literal["model"] = "model"
    created: Count
    owned_by: str = "gateway"
    root: str
    parent: str | None
    max_model_len: int | None
    context_length: int | None
    modes: list[str]


class Models(AnswerModel):
    object: Literal["list"] = "list"
    data: list[Model]


@router.get("/v1/models/", include_in_schema=False)
@router.get(
    "/v1/models",
    summary="List the base model, its adapters, and models of embeddings and reranking.",
    responses=refusals(400, 401),
    openapi_extra=needs("api_key", optional=True, query=PAGE),
)
async def list_models(
    request: Request, response: Response, service: Running, tenant: Caller
) -> Models | ModelPage:
    response.headers.append(*_VARIES)
    base = service.settings.model_name
    data = [_build_base(service)] if service.access.can_see(tenant, base) else []
    data += [
        _build_adapter(service, record.name, record.version)
        for record in service.adapters.records
        if service.access.can_see(tenant, record.name)
    ]
    data += [
        _build_mapped(service, model)
        for model in service.mapped.all
        if service.access.can_see(tenant, model.name)
    ]
    if _wants_anthropic(request):
        return select_page(request, [_to_anthropic(model) for model in data])
    return Models(data=data)


@router.get(
    "/v1/models/{model:path}",
    summary="Get a model.",
    responses=refusals(401, 403, 404, 503),
    openapi_extra=needs("api_key", optional=True),
)
async def retrieve_model(
    request: Request, response: Response, service: Running, tenant: Caller, model: Name
) -> Model | ModelInfo:
    response.headers.append(*_VARIES)
    found = _find(service, tenant, model)
    return _to_anthropic(found) if _wants_anthropic(request) else found


def _find(service: Service, tenant: Tenant | None, model: str) -> Model:
    """Return the description of a model.

    Raise the errors of `Access.route` if the tenant may not use the model or no model has this
    name.
    """
    if (other := service.mapped.get(model)) is not None:
        service.access.route(service.mapped, tenant, model)
        return _build_mapped(service, other)
    service.access.route(service.router, tenant, model)
    if model == service.settings.model_name:
        return _build_base(service)
    _, version = service.adapters.resolve(model)
    return _build_adapter(service, model, version)


def _wants_anthropic(request: Request) -> bool:
    return is_anthropic(request.url.path, exchange_of(request.scope).fields)


def _to_anthropic(model: Model) -> ModelInfo:
    generates = model.modes not in (["embeddings"], ["rerank"])
    return describe(model.id, model.created, context=model.context_length, generates=generates)


def _build_base(service: Service) -> Model:
    name = service.settings.model_name
    return _build_model(service, name, service.created, root=name, parent=None)


def _build_mapped(service: Service, model: AnyModel) -> Model:
    does = "embeddings" if isinstance(model.entry, EmbeddingModel) else "rerank"
    return Model(
        id=model.name,
        created=service.created,
        root=model.name,
        parent=None,
        max_model_len=model.entry.max_tokens,
        context_length=model.entry.max_tokens,
        modes=[does],
    )


def _build_adapter(service: Service, model: str, version: Version) -> Model:
    root = selector(selected_name(model), version.digest)
    return _build_model(service, model, int(version.created), root=root, parent=version.base)


def _build_model(
    service: Service, name: str, created: int, *, root: str, parent: str | None
) -> Model:
    # While Triton is unavailable, return null as length instead of an error. Clients can then still
    # show the model to their users.
    replicas = service.replicas
    served = replicas.capabilities if replicas.ready else []
    length = max([capabilities.max_seq_len for capabilities in served], default=None)
    modes = sorted({str(capabilities.mode) for capabilities in served})
    return Model(
        id=name,
        created=created,
        root=root,
        parent=parent,
        max_model_len=length,
        context_length=length,
        modes=modes,
    )
