"""Endpoints of Anthropic's Messages API: POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial

import orjson
from fastapi import Request
from starlette.responses import Response

from gateway.api import ignored
from gateway.api.anthropic.answer_schemas import Message, MessageError, StreamEvent, TokenCount
from gateway.api.anthropic.answers import ANTHROPIC, MessageAnswer
from gateway.api.anthropic.cache_fill import CacheFillAnswer
from gateway.api.anthropic.requests import (
    MessagesChat,
    MessagesRequest,
    Prompt,
    parse,
    restore_client_name,
)
from gateway.api.openai.parameters import get_rules
from gateway.api.openai.system_messages import render_prompt
from gateway.api.receiving import receive
from gateway.api.request_log import Handler, service_of
from gateway.api.routing import BODY, ApiRouter, Schema, needs, reference, refusals
from gateway.api.serving import PreparedRequest, prepare_request, respond
from gateway.generation.batch import Batch
from gateway.generation.options import Options
from gateway.pipeline.fit import check_text, longest_prompt
from gateway.service import Service

router = ApiRouter()


def _describe_errors() -> dict[int | str, Schema]:
    """Return the OpenAPI descriptions of all error responses. Their bodies are `MessageError`."""
    refused = refusals(*BODY, 401, 403, 404, 429, 503, 504)
    for answer in refused.values():
        answer["content"] = {"application/json": {"schema": reference(MessageError)}}
    return refused


def _describe_stream() -> Schema:
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": reference(StreamEvent),
    }
    event: Schema = {"type": "object", "required": ["data"], "properties": {"data": data}}
    return {"content": {"text/event-stream": {"schema": event}}}


@router.post(
    "/v1/messages",
    summary="Answer a conversation, in Anthropic's protocol.",
    openapi_extra=needs("api_key", optional=True, json=MessagesRequest),
    response_model=Message,
    responses={200: _describe_stream(), **_describe_errors()},
)
async def messages(request: Request) -> Response:
    return await respond(request, await _prepare(request), ANTHROPIC)


async def _prepare(request: Request) -> PreparedRequest:
    """Receive a request and prepare it for generation.

    The request's body may be megabytes. The returned object does not refer to the body, so the body
    is freed when this function returns.
    """
    read = partial(parse, MessagesRequest, **get_rules(service_of(request.scope).settings))
    async with receive(request, read, restore_client_name) as received:
        return await prepare_request(received, received.wanted, render_prompt, _make_answer)


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a conversation, in Anthropic's protocol.",
    openapi_extra=needs("api_key", optional=True, json=Prompt),
    response_model=TokenCount,
    responses=_describe_errors(),
)
async def count_tokens(request: Request) -> Response:
    service = service_of(request.scope)
    read = partial(parse, Prompt, **get_rules(service.settings))
    async with receive(request, read, restore_client_name) as received:
        route = service.access.route(service.router, received.tenant, received.wanted.model)
        chat = service.prompts.chat_of(route.chat_template)
        render = partial(render_prompt, received.wanted, chat)
        (prompt,), _ = await received.intake.work(render)
        assert not isinstance(prompt, list)  # a template writes text
        longest = max(service.replicas.capabilities, key=longest_prompt)
        check_text(service.prompts, longest, str(prompt), param="messages")
        ids = await service.prompts.encode(
            prompt, add_special_tokens=False, tenant=received.tenant_name
        )
        headers = ignored.build_headers(received.hints)
    body = orjson.dumps({"input_tokens": len(ids)})
    return Response(body, media_type="application/json", headers=headers)


HOT: dict[str, Handler] = {"/v1/messages": messages}
"""Endpoint functions by path, for POST requests.

To save CPU, `gateway.app` calls these functions directly instead of through FastAPI.
"""


def _make_answer(_: Service, wanted: MessagesChat, options: Options, batch: Batch) -> MessageAnswer:
    asked = wanted.output_limit or 0
    answer = CacheFillAnswer if wanted.without_output else MessageAnswer
    return answer(wanted.model, batch, max_tokens=asked, omit_thinking=wanted.omit_thinking)
