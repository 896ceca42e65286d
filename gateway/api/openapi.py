"""GET /openapi.json: this server's OpenAPI 3.1 document, built from the routes on first request.

FastAPI only finds models in the signatures and response models of routes. This module adds the
models of request bodies (see `body`), of stream events, and of errors.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from copy import copy
from importlib.metadata import version
from typing import Any

import orjson
from fastapi import Request
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from gateway.api import tokens
from gateway.api.admin import adapters, keys, vllm_adapters
from gateway.api.answer_schemas import ChatCompletionChunk, CompletionChunk, Described, Error
from gateway.api.anthropic.answer_schemas import MessageError, StreamEvent
from gateway.api.anthropic.requests import MessagesRequest, Prompt
from gateway.api.console import actions as console_actions
from gateway.api.openai.parameter_table import HARMLESS, HINTS
from gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.api.responses import conversations
from gateway.api.responses.answer_schemas import ResponseEvent
from gateway.api.responses.requests import InputTokensRequest, ResponseRequest
from gateway.api.routing import ApiRouter, Schema, refusals
from gateway.api.vectors import embeddings, rerank

router = ApiRouter()

_GENERATIONS = (
    ChatCompletionRequest,
    CompletionRequest,
    MessagesRequest,
    Prompt,
    ResponseRequest,
    InputTokensRequest,
)
_PLAIN_REQUESTS = (
    conversations.NewConversation,
    conversations.ChangedConversation,
    conversations.AddedItems,
    tokens.TokenizeRequest,
    tokens.DetokenizeRequest,
)
_REQUEST_MODELS = (
    *_GENERATIONS,
    embeddings.EmbeddingsRequest,
    rerank.RerankRequest,
    *_PLAIN_REQUESTS,
    adapters.AdapterOfSource,
    adapters.Rollback,
    vllm_adapters.LoadLoraAdapter,
    vllm_adapters.UnloadLoraAdapter,
    keys.NewKey,
    console_actions.ReplicaChange,
)
_ANSWER_MODELS = (
    ChatCompletionChunk,
    CompletionChunk,
    Error,
    StreamEvent,
    MessageError,
    ResponseEvent,
)
_REFERENCE = re.compile(r"#/components/schemas/(\w+)")
_OTHER = "#/components/schemas/OtherObject"
_REQUEST_ID = {
    "description": "The request's own id if it is short and plain, else a new one.",
    "required": True,
    "schema": {"type": "string"},
}
# Schemas of FastAPI's own errors, which never occur: path parameters are strings.
_UNUSED = ("HTTPValidationError", "ValidationError")


class OpenApi(Described):
    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]


@router.get("/openapi.json", summary="This document.", response_model=OpenApi, responses=refusals())
async def document(request: Request) -> Response:
    # Use a thread: the first call builds the document, which takes a tenth of a second.
    text = await asyncio.to_thread(request.app.state.openapi)
    return Response(text, media_type="application/json")


def build(routes: Sequence[APIRoute]) -> bytes:
    """Return the OpenAPI document for these routes as JSON."""
    described = get_openapi(
        title="triton-openai-gateway",
        version=version("triton-openai-gateway"),
        description="OpenAI-compatible API for Triton and TensorRT-LLM.",
        routes=[_without_head(route) for route in routes],
    )
    for path in described["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
            for answer in operation["responses"].values():
                answer["headers"] = {"x-request-id": {"$ref": "#/components/headers/x-request-id"}}
    components = described["components"]
    components["schemas"] = _build_schemas() | {
        name: schema for name, schema in components["schemas"].items() if name not in _UNUSED
    }
    components["headers"] = {"x-request-id": _REQUEST_ID}
    bearer = {"type": "http", "scheme": "bearer"}
    components["securitySchemes"] = {"admin_key": bearer, "api_key": bearer}
    _allow_overlap(described)
    return orjson.dumps(described)


def _allow_overlap(part: Any) -> None:
    """Replace `oneOf` by `anyOf`, in place, in unions that have the branch `OtherObject`.

    An object may match this branch and also another branch. `oneOf` forbids that.
    """
    if isinstance(part, list):
        for each in part:
            _allow_overlap(each)
    if not isinstance(part, dict):
        return
    branches = part.get("oneOf")
    if isinstance(branches, list) and {"$ref": _OTHER} in branches:
        part["anyOf"] = part.pop("oneOf")
    for each in part.values():
        _allow_overlap(each)


def _without_head(route: APIRoute) -> APIRoute:
    """Return a copy of a route without the method HEAD, so that the document does not list HEAD."""
    listed = copy(route)
    listed.methods = (route.methods or set()) - {"HEAD"}
    return listed


def _build_schemas() -> dict[str, Schema]:
    """Return the schemas, by name, of models that FastAPI does not find in the routes."""
    _, definitions = models_json_schema(
        [(model, "validation") for model in (*_REQUEST_MODELS, *_ANSWER_MODELS)],
        ref_template="#/components/schemas/{model}",
    )
    schemas: dict[str, Schema] = definitions["$defs"]
    others = {
        name: {"description": "Accepted without effect."} for name in sorted(HARMLESS | HINTS)
    }
    for model in (ChatCompletionRequest, CompletionRequest):
        schemas[model.__name__]["properties"] |= others
    _allow_unknown_names(schemas)
    return schemas


def _allow_unknown_names(schemas: dict[str, Schema]) -> None:
    """Allow unknown fields in the schemas of most requests and of the objects inside them.

    The schemas of inputs to embeddings and reranking still forbid unknown fields: every field of an
    input affects the result, so none can be ignored.
    """
    waiting = [model.__name__ for model in (*_GENERATIONS, *_PLAIN_REQUESTS)]
    found = {embeddings.EmbeddingsRequest.__name__, rerank.RerankRequest.__name__, *waiting}
    while waiting:
        text = orjson.dumps(schemas[waiting.pop()]).decode()
        new = set(_REFERENCE.findall(text)) - found
        found |= new
        waiting += new
    for name in found:
        if schemas[name].get("additionalProperties") is False:
            del schemas[name]["additionalProperties"]
