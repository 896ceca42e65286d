"""GET /openapi.json: this server's own OpenAPI 3.1 document, built once from the routes and models.

FastAPI's generator reads the signatures of handlers. Ours take the bare request, so that nothing
is validated or copied twice, and so each is described here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version

import orjson
from fastapi import Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from gateway.api import adapters, generations, models, ops, tokens
from gateway.api.answer_schemas import ANSWERS, Schema
from gateway.api.request_log import Handler
from gateway.api.schemas import HARMLESS, ChatCompletionRequest, CompletionRequest

_JSON = "application/json"
_REASONS = {
    400: "The request is malformed, or a parameter is out of range or not supported.",
    401: "No key, or a wrong one.",
    403: "This key may not do this, or nobody may on this server.",
    404: "No such model or adapter, for this key.",
    413: "The body is larger than this server takes.",
    415: "The body is of another media type.",
    429: "A limit of this key is reached; retry-after says when to try again.",
    500: "The server or its engine failed; a retry does not help.",
    503: "The engine is not ready or too busy, or this server is ending; try again.",
    504: "The request took longer than this server allows.",
}
_BODY = (400, 413, 415)
_KEYS: Mapping[str, tuple[int, ...]] = {
    adapters.__name__: (401, 403),
    generations.__name__: (401, 403, 429),
    tokens.__name__: (401, 403),
    models.__name__: (401,),
}
"""By module, the errors that come of keys."""
_ENGINE = (503, 504)


@dataclass(frozen=True)
class Operation:
    """What a handler takes and answers. Every operation may also answer 500."""

    summary: str
    answer: str | None
    """Name of the answer's schema; None for plain text."""
    errors: tuple[int, ...] = ()
    body: type[BaseModel] | Schema | None = None
    body_required: bool = True
    status: int = 200
    chunk: str | None = None
    """Name of the schema of streamed chunks."""


_UPLOAD: Schema = {
    "type": "object",
    "required": ["name", "base", "file"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "base": {"type": "string", "minLength": 1, "description": "The base model's name."},
        "file": {
            "type": "array",
            "minItems": 1,
            "items": {"type": "string", "contentMediaType": "application/octet-stream"},
            "description": "The adapter's files under their own names: adapter_config.json and "
            "adapter_model.safetensors, or model.lora_config.npy and model.lora_weights.npy.",
        },
    },
}


async def document(request: Request) -> Response:
    return Response(request.app.state.openapi, media_type=_JSON)


OPERATIONS: Mapping[Handler, Operation] = {
    generations.chat_completions: Operation(
        "Answers a conversation.",
        "ChatCompletion",
        (*_BODY, 404, *_ENGINE),
        ChatCompletionRequest,
        chunk="ChatCompletionChunk",
    ),
    generations.completions: Operation(
        "Continues a text.",
        "Completion",
        (*_BODY, 404, *_ENGINE),
        CompletionRequest,
        chunk="CompletionChunk",
    ),
    tokens.tokenize: Operation(
        "Text, or a conversation, to token ids.",
        "Tokens",
        (*_BODY, 404, 503),
        tokens.TokenizeRequest,
        body_required=False,
    ),
    tokens.detokenize: Operation(
        "Token ids to text.", "Text", (*_BODY, 404, 503), tokens.DetokenizeRequest
    ),
    models.list_models: Operation("The base model and its adapters.", "Models"),
    models.retrieve_model: Operation("One model.", "Model", (403, 404, 503)),
    adapters.add: Operation(
        "Adds an adapter, or a new version of one.",
        "AdapterAdded",
        (*_BODY, 503),
        _UPLOAD,
        status=201,
    ),
    adapters.list_all: Operation("All adapters with their versions.", "Adapters"),
    adapters.rollback: Operation(
        "Serves an older version of an adapter.",
        "Adapter",
        (*_BODY, 404, 503),
        adapters.Rollback,
        body_required=False,
    ),
    adapters.verify: Operation(
        "Reads every version of an adapter with its checksums.", "AdapterVerified", (404, 503)
    ),
    adapters.show: Operation("One adapter with its versions.", "Adapter", (404,)),
    adapters.remove: Operation("Stops serving an adapter.", "AdapterDeleted", (404, 503)),
    adapters.load: Operation(
        "Adds an adapter from a folder of the server's host; vLLM's form.",
        None,
        (*_BODY, 503),
        adapters.LoadLoraAdapter,
    ),
    adapters.unload: Operation(
        "Stops serving an adapter; vLLM's form.",
        None,
        (*_BODY, 404, 503),
        adapters.UnloadLoraAdapter,
    ),
    ops.live: Operation("Whether the process answers.", "Health"),
    ops.ready: Operation("Whether a request would be served now; 503 says why not.", "Health"),
    ops.metrics: Operation("Metrics for Prometheus.", None, (401, 403)),
    document: Operation("This document.", "OpenApi"),
}


def build(routes: Iterable[tuple[str, str, Handler]]) -> bytes:
    """The document as JSON. Raises KeyError for a route whose handler is not described here."""
    bodies = [op.body for op in OPERATIONS.values() if isinstance(op.body, type)]
    _, definitions = models_json_schema(
        [(model, "validation") for model in bodies],
        ref_template="#/components/schemas/{model}",
    )
    schemas: Schema = definitions["$defs"] | ANSWERS
    for model in (ChatCompletionRequest, CompletionRequest):
        harmless = {name: {"description": "Accepted without effect."} for name in sorted(HARMLESS)}
        schemas[model.__name__]["properties"] |= harmless
    paths: dict[str, dict[str, Schema]] = {}
    for method, path, handler in routes:
        shown = path.replace(":path}", "}")
        operation = _operation(shown, handler, OPERATIONS[handler])
        paths.setdefault(shown, {})[method.lower()] = operation
    return orjson.dumps(
        {
            "openapi": "3.1.0",
            "info": {
                "title": "triton-openai-gateway",
                "version": version("triton-openai-gateway"),
                "description": "OpenAI-compatible API for Triton and TensorRT-LLM.",
            },
            "paths": paths,
            "components": {
                "schemas": schemas,
                "headers": {
                    "x-request-id": {
                        "description": "The request's own when it was short and plain.",
                        "required": True,
                        "schema": {"type": "string"},
                    }
                },
                "securitySchemes": {
                    "admin_key": {"type": "http", "scheme": "bearer"},
                    "api_key": {"type": "http", "scheme": "bearer"},
                },
            },
        }
    )


def _operation(path: str, handler: Handler, described: Operation) -> Schema:
    errors = {*described.errors, *_KEYS.get(handler.__module__, ()), 500}
    answers = {str(described.status): _answer("As asked.", _content(described))}
    for status in sorted(errors):
        answers[str(status)] = _answer(_REASONS[status], {_JSON: _ref("Error")})
    if handler is ops.ready:
        answers["503"] = _answer("Not ready.", {_JSON: _ref("Health")})
    operation: Schema = {
        "operationId": f"{handler.__module__.rpartition('.')[2]}.{handler.__name__}",
        "summary": described.summary,
        "responses": answers,
    }
    if handler.__module__ == adapters.__name__:
        operation["security"] = [{"admin_key": []}]
    elif handler is ops.metrics:
        operation["security"] = [{}, {"admin_key": []}]
    elif handler.__module__ in _KEYS:
        # A gateway without tenants needs none.
        operation["security"] = [{}, {"api_key": []}]
    if described.body is not None:
        operation["requestBody"] = _body(described.body, required=described.body_required)
    if "{" in path:
        name = path[path.index("{") + 1 : path.index("}")]
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    return operation


def _content(described: Operation) -> Schema:
    if described.answer is None:
        return {"text/plain": {"type": "string"}}
    content = {_JSON: _ref(described.answer)}
    if described.chunk:
        content["text/event-stream"] = _event(described.chunk)
    return content


def _event(chunk: str) -> Schema:
    """One event of a stream; of an error after the first one there is no status to tell it."""
    data = {
        "type": "string",
        "contentMediaType": _JSON,
        "contentSchema": {"anyOf": [_ref(chunk), _ref("Error")]},
    }
    done = {"const": "[DONE]", "description": "The last event."}
    return {"type": "object", "required": ["data"], "properties": {"data": {"anyOf": [done, data]}}}


def _answer(description: str, content: Mapping[str, Schema]) -> Schema:
    return {
        "description": description,
        "headers": {"x-request-id": {"$ref": "#/components/headers/x-request-id"}},
        "content": {media: {"schema": schema} for media, schema in content.items()},
    }


def _body(body: type[BaseModel] | Schema, *, required: bool) -> Schema:
    if isinstance(body, type):
        return {"required": required, "content": {_JSON: {"schema": _ref(body.__name__)}}}
    return {"required": required, "content": {"multipart/form-data": {"schema": body}}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
