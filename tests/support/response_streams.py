"""Requests of the Responses API, and streamed and complete answers from given deltas."""

from __future__ import annotations

import json
from typing import Any, cast

import orjson
from openai.types.responses import Response

from gateway.api.responses.answers import ResponseAnswer
from gateway.api.responses.chats import ResponsesChat, parse
from gateway.api.responses.requests import ResponseRequest
from gateway.deltas import TextDelta
from tests.support.answers_read import Written, response_of
from tests.support.generations import batch

QUESTION = {"role": "user", "content": "Hi"}
FUNCTION = {"type": "function", "name": "f"}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}


def chat(**fields: Any) -> ResponsesChat:
    return parse(ResponseRequest, orjson.dumps({"model": "m", "input": "Hi"} | fields)).request


def answer(**fields: Any) -> ResponseAnswer:
    return answer_to(chat(**fields))


def answer_to(wanted: ResponsesChat) -> ResponseAnswer:
    return ResponseAnswer(cast(Any, None), wanted, batch(prompt_tokens=100))


def stream_answer(deltas: list[TextDelta], **fields: Any) -> dict[str, Any]:
    body = Written()
    sink = answer(**fields).stream(body, "last")
    for delta in deltas:
        sink.accept(0, delta)
    return response_of(body.data)


def complete_answer(deltas: list[TextDelta], **fields: Any) -> dict[str, Any]:
    body = answer(**fields).build_complete([deltas], num_returned=None)
    Response.model_validate_json(body, strict=True)
    found: dict[str, Any] = json.loads(body)
    return found
