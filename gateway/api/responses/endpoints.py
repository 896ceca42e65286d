"""POST /v1/responses and POST /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import orjson
from fastapi import Request
from starlette.responses import Response

from gateway.api import ignored
from gateway.api.auth import tenant_of
from gateway.api.intake import Intake
from gateway.api.parameters import rules
from gateway.api.request_log import Handler, context_of, service_of
from gateway.api.responses.answer_schemas import InputTokens, ResponseObject, streamed
from gateway.api.responses.answers import ResponseAnswer
from gateway.api.responses.background import Background
from gateway.api.responses.chats import Chat, as_written, parse
from gateway.api.responses.keeping import Keeper, Keeping, settled
from gateway.api.responses.looks import asked_by
from gateway.api.responses.prompts import count_of, truncated
from gateway.api.responses.requests import InputTokensRequest, ResponseRequest
from gateway.api.responses.retrieval import followed
from gateway.api.routing import BODY, Router, needs, refusals
from gateway.api.serving import Prepared, Prompts, headers_of, prepared, respond
from gateway.config.tenants import Tenant
from gateway.errors import InvalidRequest
from gateway.generation import Batch, Options
from gateway.service import Service
from gateway.tokenization.chat_format import ChatFormat

router = Router()

_REFUSED = refusals(*BODY, 401, 403, 404, 429, 503, 504)


@router.post(
    "/v1/responses",
    summary="Answers a conversation of items.",
    openapi_extra=needs("api_key", optional=True, json=ResponseRequest),
    response_model=ResponseObject,
    responses={200: streamed(), **_REFUSED},
)
async def create(request: Request) -> Response:
    service = service_of(request.scope)
    read = partial(parse, ResponseRequest, **rules(service.settings))

    keeping: Keeping | None = None
    more_hints: Sequence[str] = ()

    async def settle(intake: Intake, tenant: Tenant | None, chat: Chat) -> Chat:
        nonlocal keeping, more_hints
        ask = asked_by(request, tenant, intake)
        chat, before, keeping, more_hints = await settled(service, ask, chat)
        request.app.state.unkept.add(keeping)
        if keeping.background:
            request.app.state.background.check_room(ask.tenant)
        return await truncated(service, intake, tenant, chat, keeping.turns.prompt_of, before)

    def written(chat: Chat, form: ChatFormat) -> Prompts:
        assert keeping is not None
        return keeping.turns.prompt_of(chat, form)

    def answer(service: Service, chat: Chat, _: Options, batch: Batch) -> ResponseAnswer:
        assert keeping is not None
        keeping.turns.tokenized(keep=keeping.stored)
        return ResponseAnswer(
            service.prompts, chat, batch, stored=keeping.stored, held=keeping.keeps
        )

    ready = await prepared(request, read, written, answer, settle, as_written)
    assert isinstance(ready.answer, ResponseAnswer)
    assert keeping is not None
    ready.hints += (*more_hints,)
    if keeping.background:
        return await _in_background(request, ready, keeping)
    keeper = Keeper(keeping, ready.answer) if keeping.keeps else None
    return await respond(request, ready, ready.answer.wire(), keeper)


@router.post(
    "/v1/responses/input_tokens",
    summary="How many tokens a conversation of items is.",
    openapi_extra=needs("api_key", optional=True, json=InputTokensRequest),
    response_model=InputTokens,
    responses=_REFUSED,
)
async def input_tokens(request: Request) -> Response:
    service = service_of(request.scope)
    tenant = tenant_of(request)
    read = partial(parse, InputTokensRequest, **rules(service.settings))
    async with Intake(request, tenant) as intake:
        with await service.accounting.count(tenant, slots=1):
            chat, hints, unknown = await intake.read(read)
            service.metrics.count_unknown_parameters(unknown, tenant.name if tenant else "")
            try:
                ask = asked_by(request, tenant, intake)
                chat, before, keeping, more_hints = await settled(service, ask, chat)
                write = keeping.turns.prompt_of
                chat = await truncated(service, intake, tenant, chat, write, before)
                count = await count_of(service, intake, tenant, chat, write)
            except InvalidRequest as error:
                raise as_written(error) from None
    told = {"object": "response.input_tokens", "input_tokens": count}
    headers = ignored.headers_of([*hints, *more_hints])
    return Response(orjson.dumps(told), media_type="application/json", headers=headers)


async def _in_background(request: Request, ready: Prepared, keeping: Keeping) -> Response:
    background: Background = request.app.state.background
    # Nobody waits for its first token.
    ready.batch.caller = replace(
        ready.batch.caller, first_token_within=None, max_expected_wait_s=None
    )
    response_id = await background.begin(context_of(request.scope), ready, keeping)
    headers = headers_of(ready)
    if ready.stream:
        return followed(request, keeping.tenant, response_id, 0, headers)
    assert isinstance(ready.answer, ResponseAnswer)
    response = ready.answer.response("queued")
    return Response(response, media_type="application/json", headers=headers)


HOT: dict[str, Handler] = {"/v1/responses": create}
"""The endpoint whose POSTs are answered in front of FastAPI, by path."""
