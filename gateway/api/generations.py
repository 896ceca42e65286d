"""POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

import uuid

from fastapi import Request
from starlette.responses import Response

from gateway.api.answers import Answer, Kind
from gateway.api.body import read_body
from gateway.api.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    parse,
)
from gateway.api.sse import EventStream, cancel_on_disconnect
from gateway.pipeline import generate, prepare
from gateway.routing import Route
from gateway.service import Service


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, service.settings.max_body_bytes)
    wanted = parse(ChatCompletionRequest, body)
    route = service.router.resolve(wanted.model)
    text = service.prompts.render([message.for_template() for message in wanted.messages])
    return await _answer("chat", request, route, wanted, text)


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, service.settings.max_body_bytes)
    wanted = parse(CompletionRequest, body)
    route = service.router.resolve(wanted.model)
    return await _answer("completion", request, route, wanted, wanted.prompt)


async def _answer(
    kind: Kind, request: Request, route: Route, wanted: GenerationRequest, text: str
) -> Response:
    service: Service = request.app.state.service
    generation = await prepare(
        service,
        text,
        # The engine knows the request by this id, so it must be unique whatever the client sends.
        request_id=uuid.uuid4().hex,
        sampling=wanted.sampling(),
        stop=wanted.stop_strings,
        max_tokens=wanted.output_limit,
        chat=kind == "chat",
        lora=route.lora,
    )
    answer = Answer(kind, wanted.model, generation)
    deltas = generate(service, generation)
    headers = {"x-adapter-version": route.version} if route.version else {}
    if wanted.stream:
        frames = answer.frames(deltas, include_usage=wanted.include_usage)
        return EventStream(frames, headers)
    async with cancel_on_disconnect(request.receive):
        body = await answer.collect(deltas)
    return Response(body, media_type="application/json", headers=headers)
