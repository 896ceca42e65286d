"""POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fastapi import Request
from starlette.responses import Response

from gateway.api.answers import Answer, Kind
from gateway.api.body import read_body
from gateway.api.logprobs import chat_logprobs, completion_logprobs
from gateway.api.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    parse,
)
from gateway.api.sse import EventStream, cancel_on_disconnect
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.message import MessageForm
from gateway.pipeline import choices, prepare
from gateway.reasoning import is_open
from gateway.service import Service


async def chat_completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, service.settings.max_body_bytes)
    wanted = parse(ChatCompletionRequest, body)
    form = service.prompts.tool_form
    messages = [message.for_template(form) for message in wanted.messages]
    extra = dict(wanted.chat_template_kwargs or {})
    if wanted.reasoning_effort is not None:
        extra["reasoning_effort"] = wanted.reasoning_effort
    if wanted.continue_final_message and wanted.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message excludes add_generation_prompt.",
            param="continue_final_message",
        )
    prompt = service.prompts.render(
        messages,
        wanted.offered_tools,
        extra,
        open_turn=wanted.add_generation_prompt is not False,
        go_on=bool(wanted.continue_final_message),
    )
    return await _answer("chat", request, wanted, [prompt], _message_form(service, wanted, prompt))


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body = await read_body(request, service.settings.max_body_bytes)
    wanted = parse(CompletionRequest, body)
    return await _answer("completion", request, wanted, wanted.prompts)


def _message_form(
    service: Service, wanted: ChatCompletionRequest, prompt: str
) -> MessageForm | None:
    """How to read the answer; None when it is plain text."""
    prompts = service.prompts
    tools = None
    if wanted.offered_tools:
        tools = prompts.tool_form
        if tools is None and wanted.forced is None:
            raise UnsupportedParameter(
                "This model's chat template teaches no known form of tool calls; "
                "GATEWAY_TOOL_FORM can name one.",
                param="tools",
            )
    # A guide holds from the first token on: there is no room for thoughts before the answer.
    guided = wanted.guide()[0] is not None
    reasoning = None if guided else prompts.reasoning_tags
    if tools is None and reasoning is None and wanted.forced is None:
        return None
    return MessageForm(
        tools=tools,
        required=wanted.forced == "",
        named=wanted.forced or None,
        parallel=wanted.parallel_tool_calls is not False,
        reasoning=reasoning,
        reasoning_open=reasoning is not None and is_open(prompt, reasoning),
    )


async def _answer(
    kind: Kind,
    request: Request,
    wanted: GenerationRequest,
    prompts: list[str] | list[list[int]],
    message: MessageForm | None = None,
) -> Response:
    service: Service = request.app.state.service
    route = service.router.resolve(wanted.model)
    options = replace(wanted.options(route.lora), message=message)
    batch = await prepare(service, prompts, options, chat=kind == "chat")
    logprobs = None
    if wanted.alternatives is not None:
        form = chat_logprobs if kind == "chat" else completion_logprobs
        logprobs = partial(form, prompts=service.prompts)
    token_ids = bool(wanted.return_token_ids)
    answer = Answer(kind, wanted.model, batch, logprobs, token_ids=token_ids)
    deltas = choices(service, batch)
    headers = {"x-adapter-version": route.version} if route.version else {}
    if wanted.stream:
        frames = answer.frames(deltas, include_usage=wanted.include_usage)
        return EventStream(frames, headers, service.settings.keep_alive)
    async with cancel_on_disconnect(request.receive):
        body = await answer.collect(deltas, keep=wanted.keep)
    return Response(body, media_type="application/json", headers=headers)
