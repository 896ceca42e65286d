"""POST /tokenize and POST /detokenize, compatible with vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import orjson
from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from gateway.api.answer_schemas import Count
from gateway.api.auth import authenticate_tenant
from gateway.api.field_types import MAX_IDS, TokenId
from gateway.api.intake import Intake
from gateway.api.openai.chat_tools import Tools
from gateway.api.openai.messages import Messages, Strict
from gateway.api.plain_requests import read_plain
from gateway.api.request_log import service_of
from gateway.api.routing import BODY, ApiRouter, needs, refusals
from gateway.api.successors import OF_DETOKENIZE, OF_TOKENIZE
from gateway.errors import InvalidRequest
from gateway.parsers.tools.ids import TemplateIds
from gateway.pipeline.fit import check_text, longest_prompt
from gateway.tokenization.chat_format import ChatFormat
from gateway.tokenization.control_tokens import GuardedText

router = ApiRouter()


class TokenizeRequest(Strict):
    """A text or a chat to tokenize. Exactly one of `prompt` and `messages` must be set."""

    successors = OF_TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    successors = OF_DETOKENIZE

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_IDS)]


@dataclass(frozen=True, slots=True)
class Tokens:
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str | None] | None


@dataclass(frozen=True, slots=True)
class Text:
    prompt: str


@router.post(
    "/tokenize",
    summary="Convert text or a conversation to token ids.",
    response_model=Tokens,
    responses=refusals(*BODY, 401, 403, 404, 429, 503),
    openapi_extra=needs("api_key", optional=True, json=TokenizeRequest, empty=True),
)
async def tokenize(request: Request) -> Response:
    service = service_of(request.scope)
    tenant = authenticate_tenant(request)
    with await service.accounting.count(tenant, slots=1):
        async with Intake(request, tenant) as intake:
            wanted, headers = await read_plain(request, intake, TokenizeRequest)
            chat = service.prompts.chat
            if wanted.model is not None:
                route = service.access.route(service.router, tenant, wanted.model)
                chat = service.prompts.chat_of(route.chat_template)
            text = await intake.work(partial(_render_text, chat, wanted))
            special = wanted.add_special_tokens
            if special is None:
                special = wanted.messages is None  # chat templates add special tokens themselves
            capabilities = max(service.replicas.capabilities, key=longest_prompt)
            param = "prompt" if wanted.messages is None else "messages"
            check_text(service.prompts, capabilities, str(text), param=param)
            name = tenant.name if tenant else ""
            ids = await service.prompts.encode(text, add_special_tokens=special, tenant=name)

            def body() -> bytes:
                token = service.prompts.tokenizer.id_to_token
                strings = (
                    [token(token_id) for token_id in ids] if wanted.return_token_strs else None
                )
                max_tokens = capabilities.max_seq_len
                return orjson.dumps(Tokens(len(ids), max_tokens, ids.tolist(), strings))

            return _build_json_response(
                await service.prompts.threads.run(name, len(ids), body), headers
            )


def _render_text(chat: ChatFormat, wanted: TokenizeRequest) -> str | GuardedText:
    if wanted.prompt is not None and wanted.messages is None:
        return wanted.prompt
    if wanted.messages is None or wanted.prompt is not None:
        raise InvalidRequest("Give either prompt or messages.", param="prompt")
    ids = TemplateIds(chat.tool_form)
    return chat.render(
        [message.to_template(ids) for message in wanted.messages],
        [tool.model_dump(exclude_none=True) for tool in wanted.tools or ()] or None,
        wanted.chat_template_kwargs,
        open_turn=wanted.add_generation_prompt,
        continue_last=wanted.continue_final_message,
    )


@router.post(
    "/detokenize",
    summary="Convert token ids to text.",
    response_model=Text,
    responses=refusals(*BODY, 401, 403, 404, 429, 503),
    openapi_extra=needs("api_key", optional=True, json=DetokenizeRequest),
)
async def detokenize(request: Request) -> Response:
    service = service_of(request.scope)
    tenant = authenticate_tenant(request)
    with await service.accounting.count(tenant, slots=1):
        async with Intake(request, tenant) as intake:
            wanted, headers = await read_plain(request, intake, DetokenizeRequest)
            if wanted.model is not None:
                service.access.route(service.router, tenant, wanted.model)
            size = service.prompts.vocab_size
            if max(wanted.tokens, default=0) >= size:
                raise InvalidRequest(f"tokens: token ids must be 0 to {size - 1}.", param="tokens")
            text = await intake.work(partial(service.prompts.decode, wanted.tokens))
            return _build_json_response(orjson.dumps(Text(text)), headers)


def _build_json_response(body: bytes, headers: dict[str, str]) -> Response:
    return Response(body, media_type="application/json", headers=headers)
