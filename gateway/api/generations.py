"""POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

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
from gateway.pipeline import choices, prepare
from gateway.service import Service


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, service.settings.max_body_bytes)
    wanted = parse(ChatCompletionRequest, body)
    messages = [message.for_template() for message in wanted.messages]
    return await _answer("chat", request, wanted, [service.prompts.render(messages)])


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, service.settings.max_body_bytes)
    wanted = parse(CompletionRequest, body)
    return await _answer("completion", request, wanted, wanted.prompts)


async def _answer(
    kind: Kind, request: Request, wanted: GenerationRequest, prompts: list[str] | list[list[int]]
) -> Response:
    service: Service = request.app.state.service
    route = service.router.resolve(wanted.model)
    batch = await prepare(service, prompts, wanted.options(route.lora), chat=kind == "chat")
    answer = Answer(kind, wanted.model, batch)
    deltas = choices(service, batch)
    headers = {"x-adapter-version": route.version} if route.version else {}
    if wanted.stream:
        frames = answer.frames(deltas, include_usage=wanted.include_usage)
        return EventStream(frames, headers)
    async with cancel_on_disconnect(request.receive):
        body = await answer.collect(deltas)
    return Response(body, media_type="application/json", headers=headers)
