"""JSON schemas of the answers, for the OpenAPI document.

They hold what a client may rely on; members that come only sometimes are left open.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_STRING: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
_OBJECT_OR_NULL: Schema = {"type": ["object", "null"]}


def _object(**members: Schema) -> Schema:
    """An object that has at least these members."""
    return {"type": "object", "required": list(members), "properties": members}


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _list(items: Schema) -> Schema:
    return _object(object={"const": "list"}, data=_array(items))


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _generation(object_name: str, choice: Schema) -> Schema:
    return _object(
        id=_STRING,
        object={"const": object_name},
        created=_COUNT,
        model=_STRING,
        system_fingerprint=_TEXT_OR_NULL,
        choices=_array(choice),
    )


def _with_usage(answer: Schema) -> Schema:
    return {"allOf": [answer, _object(usage=_ref("Usage"))]}


def _choice(content: str, schema: Schema, finish: Schema) -> Schema:
    members = {content: schema, "logprobs": _OBJECT_OR_NULL, "finish_reason": finish}
    return _object(index=_COUNT, **members)


_FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}
_FINISH_OR_NULL: Schema = {"enum": [*_FINISH["enum"], None]}

_ASSISTANT_MESSAGE = _object(
    role={"const": "assistant"}, content=_TEXT_OR_NULL, refusal=_TEXT_OR_NULL
)
_ASSISTANT_MESSAGE["properties"] |= {
    "reasoning_content": _STRING,
    "tool_calls": {**_array(_ref("ToolCall")), "minItems": 1},
}

ANSWERS: dict[str, Schema] = {
    "Error": _object(
        error=_object(
            message={"type": "string", "minLength": 1},
            type={"enum": ["invalid_request_error", "server_error"]},
            param={**_TEXT_OR_NULL, "description": "The parameter that is at fault."},
            code={**_TEXT_OR_NULL, "description": "A stable word for programs."},
        )
    ),
    "Usage": _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
    ),
    "ChatCompletion": _with_usage(
        _generation("chat.completion", _choice("message", _ASSISTANT_MESSAGE, _FINISH))
    ),
    "ChatCompletionChunk": _generation(
        "chat.completion.chunk", _choice("delta", {"type": "object"}, _FINISH_OR_NULL)
    ),
    "Completion": _with_usage(_generation("text_completion", _choice("text", _STRING, _FINISH))),
    "CompletionChunk": _generation("text_completion", _choice("text", _STRING, _FINISH_OR_NULL)),
    "Tokens": _object(
        count=_COUNT,
        max_model_len=_COUNT,
        tokens=_array(_COUNT),
        token_strs={"type": ["array", "null"], "items": _STRING},
    ),
    "Text": _object(prompt=_STRING),
    "Model": _object(
        id=_STRING,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_STRING,
        root=_STRING,
        parent=_TEXT_OR_NULL,
        max_model_len={"type": ["integer", "null"]},
    ),
    "Models": _list(_ref("Model")),
    "AdapterVersion": _object(
        version=_STRING,
        digest=_STRING,
        task_id=_STRING,
        created=_COUNT,
        dtype=_STRING,
        rank=_COUNT,
        bytes=_COUNT,
        modules=_array(_STRING),
        source=_STRING,
    ),
    "Adapter": _object(
        object={"const": "adapter"},
        name=_STRING,
        base=_STRING,
        served=_STRING,
        revision=_COUNT,
        versions=_array(_ref("AdapterVersion")),
    ),
    "Adapters": _list(_ref("Adapter")),
    "AdapterAdded": {"allOf": [_ref("Adapter"), _object(warnings=_array(_STRING))]},
    "AdapterVerified": {"allOf": [_ref("Adapter"), _object(verified={"const": True})]},
    "AdapterDeleted": _object(object={"const": "adapter"}, name=_STRING, deleted={"const": True}),
    "Health": _object(status=_STRING),
    "OpenApi": _object(openapi=_STRING, info={"type": "object"}, paths={"type": "object"}),
}
"""By name in ``#/components/schemas``."""
