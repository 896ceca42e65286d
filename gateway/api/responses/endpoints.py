"""POST /v1/responses and POST /v1/responses/input_tokens.

The first endpoint creates a response. The second endpoint counts the tokens of a prompt.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import orjson
from fastapi import Request
from starlette.responses import Response

from gateway.api import ignored
from gateway.api.openai.parameters import get_rules
from gateway.api.receiving import ReceivedRequest, receive
from gateway.api.request_log import Handler, context_of, service_of
from gateway.api.responses.answer_schemas import InputTokens, ResponseObject, describe_stream
from gateway.api.responses.answers import ResponseAnswer
from gateway.api.responses.background import BackgroundResponses
from gateway.api.responses.chats import ResponsesChat, parse, rename_parameter
from gateway.api.responses.keeping import PreparedTurn, ResponseStorer, StorePlan, prepare_turn
from gateway.api.responses.looks import make_lookup
from gateway.api.responses.prompts import count_prompt_tokens, truncate
from gateway.api.responses.requests import InputTokensRequest, ResponseRequest
from gateway.api.responses.retrieval import stream_events
from gateway.api.routing import BODY, ApiRouter, needs, refusals
from gateway.api.serving import PreparedRequest, build_headers, prepare_request, respond
from gateway.generation.batch import Batch
from gateway.generation.options import Options
from gateway.service import Service

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
    ready, plan = await _prepare(request)
    assert isinstance(ready.answer, ResponseAnswer)
    if plan.is_background:
        return await _start_background(request, ready, plan)
    storer = ResponseStorer(plan, ready.answer) if plan.stores_anything else None
    return await respond(request, ready, ready.answer.wire(), storer)


async def _prepare(request: Request) -> tuple[PreparedRequest, StorePlan]:
    """Prepare a request for generation. Return it with the `StorePlan` for its response.

    The parsed body may be many megabytes. The returned objects do not refer to the body, so the
    body is freed when this function returns.
    """
    read = partial(parse, ResponseRequest, **get_rules(service_of(request.scope).settings))
    async with receive(request, read, rename_parameter) as received:
        turn = await _prepare_turn(received)
        plan = turn.plan
        request.app.state.pending_items.add(plan)
        if plan.is_background:
            request.app.state.background.check_capacity(received.tenant_name)
        chat = await _truncate(received, turn)
        ready = await prepare_request(
            received, chat, plan.turns.write_prompt, partial(_make_answer, plan)
        )
    ready.hints += (*turn.hints,)
    return ready, plan


def _make_answer(
    plan: StorePlan, service: Service, chat: ResponsesChat, _: Options, batch: Batch
) -> ResponseAnswer:
    plan.turns.finish(store=plan.stores_response)
    return ResponseAnswer(
        service.prompts,
        chat,
        batch,
        stored=plan.stores_response,
        hold_last_event=plan.stores_anything,
    )


@router.post(
    "/v1/responses/input_tokens",
    summary="How many tokens a conversation of items is.",
    openapi_extra=needs("api_key", optional=True, json=InputTokensRequest),
    response_model=InputTokens,
    responses=_ERROR_RESPONSES,
)
async def input_tokens(request: Request) -> Response:
    service = service_of(request.scope)
    read = partial(parse, InputTokensRequest, **get_rules(service.settings))
    async with receive(request, read, rename_parameter) as received:
        turn = await _prepare_turn(received)
        chat = await _truncate(received, turn)
        write = turn.plan.turns.write_prompt
        count = await count_prompt_tokens(service, received.intake, received.tenant, chat, write)
        headers = ignored.build_headers([*received.hints, *turn.hints])
    fields = {"object": "response.input_tokens", "input_tokens": count}
    return Response(orjson.dumps(fields), media_type="application/json", headers=headers)


async def _prepare_turn(received: ReceivedRequest[ResponsesChat]) -> PreparedTurn:
    lookup = make_lookup(received.request, received.tenant, received.intake)
    return await prepare_turn(service_of(received.request.scope), lookup, received.wanted)


async def _truncate(received: ReceivedRequest[ResponsesChat], turn: PreparedTurn) -> ResponsesChat:
    service, write = service_of(received.request.scope), turn.plan.turns.write_prompt
    return await truncate(service, received.intake, received.tenant, turn.chat, write, turn.before)


async def _start_background(request: Request, ready: PreparedRequest, plan: StorePlan) -> Response:
    background: BackgroundResponses = request.app.state.background
    # Remove the latency limits: no client waits for the first token.
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
"""Endpoint functions by path, for POST requests.

To save CPU, `gateway.app` calls these functions directly instead of through FastAPI.
"""
