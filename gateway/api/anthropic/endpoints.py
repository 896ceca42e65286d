"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from functools import partial

import orjson
from fastapi import Request
from starlette.responses import Response

from gateway.api import ignored
from gateway.api.anthropic.answer_schemas import Message, MessageError, StreamEvent, TokenCount
from gateway.api.anthropic.answers import ANTHROPIC, MessageAnswer
from gateway.api.anthropic.cache_fill import CacheFillAnswer
from gateway.api.anthropic.requests import Chat, MessagesRequest, Prompt, as_written, parse
from gateway.api.auth import tenant_of
from gateway.api.intake import Intake
from gateway.api.parameters import rules
from gateway.api.request_log import Handler, service_of
from gateway.api.routing import BODY, Router, Schema, needs, reference, refusals
from gateway.api.serving import prepared, respond
from gateway.api.system_messages import prompt_of
from gateway.errors import InvalidRequest
from gateway.generation import Batch, Options
from gateway.pipeline.fit import check_text, longest_prompt
from gateway.service import Service

router = Router()


def _answers() -> dict[int | str, Schema]:
    """Errors are in Anthropic's envelope; of a stream, one event is described."""
    refused = refusals(*BODY, 401, 403, 404, 429, 503, 504)
    for answer in refused.values():
        answer["content"] = {"application/json": {"schema": reference(MessageError)}}
    return refused


def _streamed() -> Schema:
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": reference(StreamEvent),
    }
    event: Schema = {"type": "object", "required": ["data"], "properties": {"data": data}}
    return {"content": {"text/event-stream": {"schema": event}}}


@router.post(
    "/v1/messages",
    summary="Answers a conversation, in Anthropic's protocol.",
    openapi_extra=needs("api_key", optional=True, json=MessagesRequest),
    response_model=Message,
    responses={200: _streamed(), **_answers()},
)
async def messages(request: Request) -> Response:
    service = service_of(request.scope)
    read = partial(parse, MessagesRequest, **rules(service.settings))
    ready = await prepared(request, read, prompt_of, _answer, as_written=as_written)
    return await respond(request, ready, ANTHROPIC)


@router.post(
    "/v1/messages/count_tokens",
    summary="How many tokens a conversation is, in Anthropic's protocol.",
    openapi_extra=needs("api_key", optional=True, json=Prompt),
    response_model=TokenCount,
    responses=_answers(),
)
async def count_tokens(request: Request) -> Response:
    service = service_of(request.scope)
    tenant = tenant_of(request)
    name = tenant.name if tenant else ""
    async with Intake(request, tenant) as intake:
        with await service.accounting.count(tenant, slots=1):
            parsed = await intake.read(partial(parse, Prompt, **rules(service.settings)))
            wanted = parsed.request
            service.metrics.count_unknown_parameters(parsed.unknown, name)
            try:
                route = service.access.route(service.router, tenant, wanted.model)
                chat = service.prompts.chat_of(route.chat_template)
                (prompt,), _ = await intake.work(partial(prompt_of, wanted, chat))
            except InvalidRequest as error:
                raise as_written(error) from None
            assert not isinstance(prompt, list)  # a template writes text
            longest = max(service.replicas.capabilities, key=longest_prompt)
            check_text(service.prompts, longest, str(prompt), param="messages")
            ids = await service.prompts.encode(prompt, add_special_tokens=False, tenant=name)
    headers = ignored.headers_of(parsed.hints)
    told = orjson.dumps({"input_tokens": len(ids)})
    return Response(told, media_type="application/json", headers=headers)


HOT: dict[str, Handler] = {"/v1/messages": messages}
"""The endpoint whose POSTs are answered in front of FastAPI, by path."""


def _answer(_: Service, wanted: Chat, options: Options, batch: Batch) -> MessageAnswer:
    asked = wanted.output_limit or 0
    answer = CacheFillAnswer if wanted.without_output else MessageAnswer
    return answer(wanted.model, batch, max_tokens=asked, omit_thinking=wanted.omit_thinking)
