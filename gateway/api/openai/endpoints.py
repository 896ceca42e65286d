"""Endpoints of OpenAI's generation APIs: POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from gateway.api.answer_schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Error,
)
from gateway.api.openai.answers import OpenAIAnswer
from gateway.api.openai.chat_prompts import PromptsAndForm, get_prompts, render_chat
from gateway.api.openai.chunks import Kind
from gateway.api.openai.generation_request import GenerationRequest
from gateway.api.openai.logprobs import (
    build_chat_logprobs,
    build_completion_logprobs,
    build_prompt_logprobs,
)
from gateway.api.openai.parameters import get_rules, parse
from gateway.api.openai.schemas import ChatCompletionRequest, CompletionRequest
from gateway.api.receiving import receive
from gateway.api.request_log import Handler, service_of
from gateway.api.routing import BODY, ApiRouter, Schema, needs, reference, refusals
from gateway.api.serving import PreparedRequest, prepare_request, respond
from gateway.api.sse import OPENAI
from gateway.generation.batch import Batch
from gateway.generation.options import Options
from gateway.service import Service
from gateway.tokenization.chat_format import ChatFormat

router = ApiRouter()

R = TypeVar("R", bound=GenerationRequest)


def _describe_answers(answer: type[BaseModel], chunk: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI description of a generation endpoint's answers, for the route decorator.

    `answer` is the model of a complete answer, `chunk` the model of a streamed event. An event may
    also be an error: after the first event, the status 200 has already been sent.
    """
    data: Schema = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": [reference(chunk), reference(Error)]},
    }
    done = {"const": "[DONE]", "description": "The last event."}
    event = {
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [done, data]}},
    }
    streamed = {"content": {"text/event-stream": {"schema": event}}}
    refused = refusals(*BODY, 401, 403, 404, 429, 503, 504)
    return {"response_model": answer, "responses": {200: streamed, **refused}}


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation.",
    openapi_extra=needs("api_key", optional=True, json=ChatCompletionRequest),
    **_describe_answers(ChatCompletion, ChatCompletionChunk),
)
async def chat_completions(request: Request) -> Response:
    ready = await _prepare(request, ChatCompletionRequest, render_chat)
    return await respond(request, ready, OPENAI)


@router.post(
    "/v1/completions",
    summary="Continue a text.",
    openapi_extra=needs("api_key", optional=True, json=CompletionRequest),
    **_describe_answers(Completion, CompletionChunk),
)
async def completions(request: Request) -> Response:
    ready = await _prepare(request, CompletionRequest, get_prompts)
    return await respond(request, ready, OPENAI)


HOT: dict[str, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
}
"""Endpoint functions by path, for POST requests.

To save CPU, `gateway.app` calls these functions directly instead of through FastAPI.
"""


async def _prepare(
    request: Request, kind: type[R], prompts: Callable[[R, ChatFormat], PromptsAndForm]
) -> PreparedRequest:
    """Parse and prepare a request.

    The returned object does not refer to the parsed body, which may be megabytes. So the body is
    freed before the generation.
    """
    read = partial(parse, kind, **get_rules(service_of(request.scope).settings))
    async with receive(request, read) as received:
        return await prepare_request(received, received.wanted, prompts, _make_answer)


def _make_answer(
    service: Service, wanted: GenerationRequest, options: Options, batch: Batch
) -> OpenAIAnswer:
    kind: Kind = "completion"
    custom: frozenset[str] = frozenset()
    if isinstance(wanted, ChatCompletionRequest):
        kind, custom = "chat", wanted.custom_names
    logprobs = None
    if wanted.num_alternatives is not None:
        form = build_chat_logprobs if kind == "chat" else build_completion_logprobs
        as_ids = bool(wanted.return_tokens_as_token_ids)
        logprobs = partial(form, prompts=service.prompts, as_ids=as_ids)
    of_prompt = None
    if options.prompt_logprobs is not None:
        of_prompt = partial(
            build_prompt_logprobs, prompts=service.prompts, count=options.prompt_logprobs
        )
    return OpenAIAnswer(
        kind,
        wanted.model,
        batch,
        logprobs,
        prompt_logprobs=of_prompt,
        token_ids=bool(wanted.return_token_ids),
        echo=wanted.echo_text,
        custom=custom,
    )
