"""Endpoints: POST /v1/responses and POST /v1/responses/input_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import orjson
from fastapi import Request
from starlette.responses import Response

from gateway.api import ignored
from gateway.api.auth import authenticate_tenant
from gateway.api.intake import Intake
from gateway.api.openai.parameters import get_rules
from gateway.api.request_log import Handler, context_of, service_of
from gateway.api.responses.answer_schemas import InputTokens, ResponseObject, describe_stream
from gateway.api.responses.answers import ResponseAnswer
from gateway.api.responses.background import BackgroundResponses
from gateway.api.responses.chats import ResponsesChat, parse, rename_parameter
from gateway.api.responses.keeping import ResponseStorer, StorePlan, prepare_turn
from gateway.api.responses.looks import make_lookup
from gateway.api.responses.prompts import count_prompt_tokens, truncate
from gateway.api.responses.requests import InputTokensRequest, ResponseRequest
from gateway.api.responses.retrieval import stream_events
from gateway.api.routing import BODY, ApiRouter, needs, refusals
from gateway.api.serving import (
    PreparedRequest,
    PromptsAndForm,
    build_headers,
    prepare_request,
    respond,
)
from gateway.config.tenants import Tenant
from gateway.errors import InvalidRequest
from gateway.generation.batch import Batch
from gateway.generation.options import Options
from gateway.service import Service
from gateway.tokenization.chat_format import ChatFormat

router = ApiRouter()

_ERROR_RESPONSES = refusals(*BODY, 401, 403, 404, 429, 503, 504)


@router.post(
    "/v1/responses",
    summary="Answers a conversation of items.",
    openapi_extra=needs("api_key", optional=True, json=ResponseRequest),
    response_model=ResponseObject,
    responses={200: describe_stream(), **_ERROR_RESPONSES},
)
async def create(request: Request) -> Response:
    service = service_of(request.scope)
    read = partial(parse, ResponseRequest, **get_rules(service.settings))

    plan: StorePlan | None = None
    more_hints: Sequence[str] = ()

    async def settle(intake: Intake, tenant: Tenant | None, chat: ResponsesChat) -> ResponsesChat:
        nonlocal plan, more_hints
        lookup = make_lookup(request, tenant, intake)
        chat, before, plan, more_hints = await prepare_turn(service, lookup, chat)
        request.app.state.pending_items.add(plan)
        if plan.is_background:
            request.app.state.background.check_capacity(lookup.tenant)
        return await truncate(service, intake, tenant, chat, plan.turns.write_prompt, before)

    def write_prompts(chat: ResponsesChat, form: ChatFormat) -> PromptsAndForm:
        assert plan is not None
        return plan.turns.write_prompt(chat, form)

    def make_answer(
        service: Service, chat: ResponsesChat, _: Options, batch: Batch
    ) -> ResponseAnswer:
        assert plan is not None
        plan.turns.finish(store=plan.stores_response)
        return ResponseAnswer(
            service.prompts,
            chat,
            batch,
            stored=plan.stores_response,
            hold_last_event=plan.stores_anything,
        )

    ready = await prepare_request(
        request, read, write_prompts, make_answer, settle, rename_parameter
    )
    assert isinstance(ready.answer, ResponseAnswer)
    assert plan is not None
    ready.hints += (*more_hints,)
    if plan.is_background:
        return await _start_background(request, ready, plan)
    storer = ResponseStorer(plan, ready.answer) if plan.stores_anything else None
    return await respond(request, ready, ready.answer.wire(), storer)


@router.post(
    "/v1/responses/input_tokens",
    summary="How many tokens a conversation of items is.",
    openapi_extra=needs("api_key", optional=True, json=InputTokensRequest),
    response_model=InputTokens,
    responses=_ERROR_RESPONSES,
)
async def input_tokens(request: Request) -> Response:
    service = service_of(request.scope)
    tenant = authenticate_tenant(request)
    read = partial(parse, InputTokensRequest, **get_rules(service.settings))
    async with Intake(request, tenant) as intake:
        with await service.accounting.count(tenant, slots=1):
            chat, hints, unknown = await intake.read(read)
            service.metrics.count_unknown_parameters(unknown, tenant.name if tenant else "")
            try:
                lookup = make_lookup(request, tenant, intake)
                chat, before, plan, more_hints = await prepare_turn(service, lookup, chat)
                write = plan.turns.write_prompt
                chat = await truncate(service, intake, tenant, chat, write, before)
                count = await count_prompt_tokens(service, intake, tenant, chat, write)
            except InvalidRequest as error:
                raise rename_parameter(error) from None
    fields = {"object": "response.input_tokens", "input_tokens": count}
    headers = ignored.build_headers([*hints, *more_hints])
    return Response(orjson.dumps(fields), media_type="application/json", headers=headers)


async def _start_background(request: Request, ready: PreparedRequest, plan: StorePlan) -> Response:
    background: BackgroundResponses = request.app.state.background
    # No client waits for the first token, so latency limits do not apply.
    ready.batch.caller = replace(
        ready.batch.caller, first_token_within=None, max_expected_wait_s=None
    )
    response_id = await background.begin(context_of(request.scope), ready, plan)
    headers = build_headers(ready)
    if ready.stream:
        return stream_events(request, plan.tenant, response_id, 0, headers)
    assert isinstance(ready.answer, ResponseAnswer)
    response = ready.answer.build_response("queued")
    return Response(response, media_type="application/json", headers=headers)


HOT: dict[str, Handler] = {"/v1/responses": create}
"""The endpoint whose POSTs are answered before FastAPI, by path."""
